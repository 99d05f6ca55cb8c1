"""Measure how much communication slows computation down, by sharing cores and memory."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stretto.comm.transport import Transport
from stretto.profiler.interleaved_timing import all_reduce_max

_TRAFFIC_STEP_RATIO = 4
"""How many times as long as an undisturbed step the messages take, so that they outlast a slower
step."""
_MAX_MESSAGES = 1000
"""Largest number of messages that are started at once."""


@dataclass(frozen=True, slots=True)
class BackgroundTraffic:
    """Messages like those of a training run; all ranks call both functions together."""

    start: Callable[[], None]
    """Starts one message without waiting for it."""
    wait: Callable[[], None]
    """Waits for all messages started."""


def measure_slowdown(
    step: Callable[[], None],
    traffic: BackgroundTraffic,
    transport: Transport,
    *,
    repeats: int = 5,
    device: str = "cpu",
) -> float:
    """Return the time of a step during messages divided by that of one without, at least 1.

    Steps with and without messages alternate, and the rank with the largest slowdown counts. All
    ranks call this together.

    Args:
        step: Computes without communication.
        traffic: The messages during a step.
        transport: Connects the ranks.
        repeats: Steps of each kind.
        device: "cpu" or "cuda", where ``step`` computes.
    """
    benchmark = _SlowdownBenchmark(step, traffic, transport, on_gpu=device == "cuda")
    benchmark.without_traffic_s()
    count = benchmark.messages_for(
        _TRAFFIC_STEP_RATIO * all_reduce_max(benchmark.without_traffic_s(), transport)
    )
    without_traffic, with_traffic = [], []
    for _ in range(repeats):
        without_traffic.append(benchmark.without_traffic_s())
        with_traffic.append(benchmark.with_traffic_s(count))
    factor = statistics.median(with_traffic) / statistics.median(without_traffic)
    return max(1.0, all_reduce_max(factor, transport))


@dataclass(frozen=True, slots=True)
class _SlowdownBenchmark:
    """Times steps with and without messages; ranks start together."""

    step: Callable[[], None]
    traffic: BackgroundTraffic
    transport: Transport
    on_gpu: bool

    def without_traffic_s(self) -> float:
        """Return the seconds of a step without messages."""
        all_reduce_max(0.0, self.transport)
        return self._timed_s(self.step)

    def with_traffic_s(self, count: int) -> float:
        """Return the seconds of a step during ``count`` messages."""
        all_reduce_max(0.0, self.transport)
        for _ in range(count):
            self.traffic.start()
        seconds = self._timed_s(self.step)
        self.traffic.wait()
        return seconds

    def messages_for(self, seconds: float) -> int:
        """Return the number of messages that take ``seconds``, the same on all ranks."""
        all_reduce_max(0.0, self.transport)
        two_messages_s = all_reduce_max(self._timed_s(self._send_two), self.transport)
        return min(_MAX_MESSAGES, max(2, math.ceil(2 * seconds / max(two_messages_s, 1e-6))))

    def _send_two(self) -> None:
        self.traffic.start()
        self.traffic.start()
        self.traffic.wait()

    def _timed_s(self, work: Callable[[], None]) -> float:
        """Return the seconds of ``work`` in this thread, or on the current CUDA stream.

        Other streams are not waited for: communication on them is not part of a step.
        """
        if not self.on_gpu:
            start_s = time.perf_counter()
            work()
            return time.perf_counter() - start_s
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

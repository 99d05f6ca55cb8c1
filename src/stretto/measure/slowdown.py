"""How many times as long computation takes while messages travel: they share cores and memory."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stretto.comm.channel import Channel
from stretto.measure.interleave import largest

_COVERED = 4
"""For so many times the step's own length messages are under way: a slower step ends before they
do."""
_MOST = 1000
"""Messages that are begun at once."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages as a run has them; all ranks call both together."""

    start: Callable[[], None]
    """Begins one, and returns."""
    wait: Callable[[], None]
    """Returns when all that were begun are over."""


def measure_slowdown(
    step: Callable[[], None],
    traffic: Traffic,
    channel: Channel,
    *,
    repeats: int = 5,
    device: str = "cpu",
) -> float:
    """Return the seconds of a step beside messages over those of one without, 1 at least.

    Steps of both kinds take turns; the rank that is slowed down most counts. All ranks together.
    """
    bench = _Bench(step, traffic, channel, on_gpu=device == "cuda")
    bench.quiet_s()
    count = bench.messages_for(_COVERED * largest(bench.quiet_s(), channel))
    quiet, busy = [], []
    for _ in range(repeats):
        quiet.append(bench.quiet_s())
        busy.append(bench.busy_s(count))
    factor = statistics.median(busy) / statistics.median(quiet)
    return max(1.0, largest(factor, channel))


@dataclass(frozen=True, slots=True)
class _Bench:
    """Where steps are timed; nobody begins before everybody is there."""

    step: Callable[[], None]
    traffic: Traffic
    channel: Channel
    on_gpu: bool

    def quiet_s(self) -> float:
        """Return the seconds of a step by itself."""
        largest(0.0, self.channel)
        return self._timed_s(self.step)

    def busy_s(self, count: int) -> float:
        """Return the same while so many messages travel."""
        largest(0.0, self.channel)
        for _ in range(count):
            self.traffic.start()
        seconds = self._timed_s(self.step)
        self.traffic.wait()
        return seconds

    def messages_for(self, seconds: float) -> int:
        """Return how many messages, as many on all ranks, take so long."""
        largest(0.0, self.channel)
        two_s = largest(self._timed_s(self._carry_two), self.channel)
        return min(_MOST, max(2, math.ceil(2 * seconds / max(two_s, 1e-6))))

    def _carry_two(self) -> None:
        self.traffic.start()
        self.traffic.start()
        self.traffic.wait()

    def _timed_s(self, work: Callable[[], None]) -> float:
        """Time what this thread does, or what the stream does that it computes on.

        Other streams of a GPU are not waited for: what travels there is not part of a step.
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

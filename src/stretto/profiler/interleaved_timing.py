"""Time several step runners in turn within one run, so that noise affects all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from stretto.comm.transport import Transport, all_reduce_small_

STEPS_PER_TIMING = 2
"""The default number of steps that are timed together."""


class StepRunner(Protocol):
    """A callable that takes a training step."""

    def __call__(self) -> None:
        """Take a step; some of its messages may still be in flight afterwards."""
        ...

    def drain(self) -> None:
        """Wait for the messages in flight; all ranks call this together."""
        ...

    def close(self) -> None:
        """End the runner's threads."""
        ...


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """One line of a benchmark: Stretto, a peer (such as DDP) and the lower bound, in seconds."""

    case: str
    ours_s: float
    """Seconds of Stretto."""
    peer: str
    """Name of the peer."""
    peer_s: float
    """Seconds of the peer."""
    bound_s: float | None
    """Lower bound for any method; None where the links are not known."""
    runs: int
    spread: float
    """Interquartile range of Stretto's runs, relative to their median."""
    ours_bytes: int | None = None
    """Peak bytes of live tensors in a step of Stretto; None where they are not counted."""
    peer_bytes: int | None = None
    """The same for the peer."""

    @property
    def ratio(self) -> float:
        """Stretto's seconds divided by the peer's: below 1 is faster."""
        return self.ours_s / self.peer_s


def time_interleaved(
    runners: Mapping[str, Callable[[], None]],
    transport: Transport,
    *,
    runs: int,
    repeat: int = 2,
    log_line: Callable[[str], None] = lambda _line: None,
) -> dict[str, list[float]]:
    """Return the seconds per call of each runner, ``runs`` values; all ranks call this together.

    Each round times every runner once, as the mean of ``repeat`` calls. The order rotates from
    round to round. Ranks start together, and the time of the slowest rank counts. One warm-up round
    is not counted.
    """
    timers = {name: partial(_time_calls, one, repeat, transport) for name, one in runners.items()}
    return _time_round_robin(timers, runs, log_line)


def time_steps_interleaved(
    runners: Mapping[str, StepRunner],
    transport: Transport,
    *,
    runs: int,
    steps: int = STEPS_PER_TIMING,
    device: str = "cpu",
    log_line: Callable[[str], None] = lambda _line: None,
) -> dict[str, list[float]]:
    """Return the seconds per training step of each runner, as `time_interleaved` does for calls.

    ``steps`` are timed together; where steps differ, they should be a whole period. A step may
    leave messages in flight, so the clock runs from the end of an untimed step to the end of the
    last one. Messages left by the untimed step are included, those left by the last step are not.
    """
    make_stopwatch = _GpuStopwatch if device == "cuda" else _CpuStopwatch
    timers = {
        name: partial(_time_steps, one, make_stopwatch(), transport, steps)
        for name, one in runners.items()
    }
    return _time_round_robin(timers, runs, log_line)


def _time_round_robin(
    timers: Mapping[str, Callable[[], float]], runs: int, log_line: Callable[[str], None]
) -> dict[str, list[float]]:
    names = list(timers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for run in range(-1, runs):
        offset = run % len(names)
        for name in names[offset:] + names[:offset]:
            seconds = timers[name]()
            if run >= 0:
                times[name].append(seconds)
        log_line(f"round {run + 1} of {runs} done")
    return times


def spread(values: list[float]) -> float:
    """Return the interquartile range relative to the median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / statistics.median(values)


def _time_calls(runner: Callable[[], None], repeat: int, transport: Transport) -> float:
    all_reduce_max(0.0, transport)  # a barrier: ranks start together
    start_s = time.perf_counter()
    for _ in range(repeat):
        runner()
    return all_reduce_max((time.perf_counter() - start_s) / repeat, transport)


class _CpuStopwatch:
    """Measures seconds of wall-clock time in this thread."""

    def start(self) -> None:
        self._start_s = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._start_s


class _GpuStopwatch:
    """Measures seconds on the current CUDA stream, without waiting for it in between."""

    def start(self) -> None:
        self._start = _record_event()

    def stop(self) -> float:
        end = _record_event()
        end.synchronize()
        return float(self._start.elapsed_time(end)) / 1e3


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _time_steps(
    runner: StepRunner, stopwatch: _CpuStopwatch | _GpuStopwatch, transport: Transport, steps: int
) -> float:
    all_reduce_max(0.0, transport)
    runner()
    stopwatch.start()
    for _ in range(steps):
        runner()
    seconds = stopwatch.stop() / steps
    runner.drain()  # none of its messages are in flight while others are timed
    return all_reduce_max(seconds, transport)


def all_reduce_max(value: float, transport: Transport) -> float:
    """Return the largest ``value`` of all ranks; all ranks call this together."""
    values_by_rank = torch.zeros(transport.size, dtype=torch.float64)
    values_by_rank[transport.rank] = value
    all_reduce_small_(values_by_rank, transport)
    return float(values_by_rank.max())

"""Measure seconds and peak bytes of real training steps, on a CPU or a GPU.

Peak bytes count the tensors that all threads allocate and free. On a GPU the allocator counts them.
On a CPU the PyTorch profiler reports every allocation and release, from before the step runner is
built. So memory that the runner keeps between steps counts as well, even memory without a Python
object such as DDP's buckets.

The current PyTorch profiler sees only the memory of the thread that started it. A strategy that
frees on another thread would appear larger than it is, one that allocates there smaller. The legacy
profiler is started per thread, so it is started in every Python thread that begins meanwhile.
Older threads and those of a back end are not followed: tensors that they free count as live.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Self

import torch
from torch._C import _autograd as profiler
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from stretto.errors import StrettoError
from stretto.planner.profile import Profile
from stretto.profiler.interleaved_timing import StepRunner

_FRAGMENTATION_SHARE = 0.10
"""Share of the allocated bytes that fragmentation adds on a GPU."""
_LIBRARY_WORKSPACE_BYTES = 128 << 20
"""Workspaces of libraries on a GPU, which no operation shows.

With these two values and expandable segments, none of 20 planned models ran out of memory on a GPU.
Without expandable segments, a third of the reserved memory was fragmented.
"""


def add_allocator_overhead(profile: Profile, device: str) -> Profile:
    """Return ``profile`` with the bytes that the allocator of ``device`` takes, overhead included.

    A plan for `torch.cuda.set_per_process_memory_fraction` needs it. The overhead on a CPU is
    negligible.
    """
    return (
        profile
        if device == "cpu"
        else profile.with_allocator_overhead(_FRAGMENTATION_SHARE, _LIBRARY_WORKSPACE_BYTES)
    )


_WARM_UP = 2
JOIN_TIMEOUT_S = 30.0
_NCCL_RELEASE_WAIT_S = 0.5

MemoryChange = tuple[float, int]
"""The time in microseconds, and the change of the live bytes."""


def peak_bytes(make: Callable[[], StepRunner], device: str) -> int:
    """Return the peak bytes of live tensors in a steady step of the runner that ``make`` builds.

    All tensors since ``make`` was called count; earlier ones do not. All ranks call this together.
    """
    gc.collect()
    return _peak_on_gpu(make) if device == "cuda" else _peak_on_cpu(make)


def _peak_on_gpu(make: Callable[[], StepRunner]) -> int:
    before = _allocated()
    runner = make()
    for _ in range(_WARM_UP):
        runner()
    _wait_for_frees()
    torch.cuda.reset_peak_memory_stats()
    runner()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    runner.drain()
    runner.close()
    del runner
    # Memory of earlier code may have been freed only meanwhile; it must not be subtracted.
    return peak - min(before, _allocated())


def _allocated() -> int:
    _wait_for_frees()
    return torch.cuda.memory_allocated()


def _wait_for_frees() -> None:
    """Wait until all unused tensors are freed.

    NCCL's own thread keeps the tensors of a message until its next poll finds the message complete.
    """
    gc.collect()
    torch.cuda.synchronize()
    time.sleep(_NCCL_RELEASE_WAIT_S)
    gc.collect()


def _peak_on_cpu(make: Callable[[], StepRunner]) -> int:
    with LiveBytesTracker() as live:
        runner = make()
        for _ in range(_WARM_UP):
            runner()
        with live.measuring():
            runner()
        runner.drain()
        runner.close()
    return live.peak


class LiveBytesTracker:
    """A context that follows the CPU tensors of this thread and of threads started in it."""

    def __init__(self) -> None:
        self.peak = 0
        """Peak live bytes inside `measuring`; set on leaving the context."""
        self._memory_changes: list[MemoryChange] = []
        self._threads: list[threading.Thread] = []
        self._measured_us = (0.0, 0.0)
        self._original_run = threading.Thread.run

    def __enter__(self) -> Self:
        self._original_run = original_run = threading.Thread.run

        def run(thread: threading.Thread) -> None:
            self._threads.append(thread)
            with self._profiling():
                original_run(thread)

        threading.Thread.run = run  # type: ignore[method-assign, assignment]
        profiler._enable_profiler_legacy(_profiler_config())
        return self

    def __exit__(self, failed: type[BaseException] | None, *_failure: object) -> None:
        threading.Thread.run = self._original_run  # type: ignore[method-assign]
        self._memory_changes += _memory_changes(profiler._disable_profiler_legacy())
        if failed is not None:
            return
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
            if thread.is_alive():
                raise StrettoError(
                    f"thread {thread.name} still runs after its step runner was closed: its "
                    "allocations cannot be counted; end the thread in close()"
                )
        self.peak = peak_between(self._memory_changes, *self._measured_us)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the peak inside this context; use it once."""
        start_us = time.time_ns() / 1e3
        yield
        self._measured_us = (start_us, time.time_ns() / 1e3)

    @contextmanager
    def _profiling(self) -> Iterator[None]:
        profiler._enable_profiler_legacy(_profiler_config())
        try:
            yield
        finally:
            self._memory_changes += _memory_changes(profiler._disable_profiler_legacy())


def peak_between(changes: Iterable[MemoryChange], start_us: float, end_us: float) -> int:
    """Return the peak live bytes between two times, bytes live at ``start_us`` included."""
    live = peak = at_start = 0
    # At equal times, allocations come before releases: an upper bound.
    for when_us, num_bytes in sorted(changes, key=lambda change: (change[0], -change[1])):
        if when_us > end_us:
            break
        live += num_bytes
        if when_us < start_us:
            at_start = live
        else:
            peak = max(peak, live)
    return max(peak, at_start)


def _profiler_config() -> ProfilerConfig:
    return ProfilerConfig(
        ProfilerState.CPU,
        report_input_shapes=False,
        profile_memory=True,
        with_stack=False,
        with_flops=False,
        with_modules=False,
        experimental_config=_ExperimentalConfig(),
    )


def _memory_changes(threads: Iterable[Iterable[Any]]) -> list[MemoryChange]:
    return [
        (event.start_us(), event.cpu_memory_usage())
        for events in threads
        for event in events
        if event.kind() == "memory_alloc"
    ]


# --- meters of the intervals of a step, see `stretto.profiler.unit_passes.IntervalMeter` ---


class CpuTimeMeter:
    """Measures seconds of wall-clock time."""

    def begin(self) -> None:
        """Start measuring a step."""
        self._moments_s = [time.perf_counter()]

    def record(self) -> None:
        """End an interval and begin the next one."""
        self._moments_s.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Return the seconds of each interval."""
        return [end_s - start_s for start_s, end_s in pairwise(self._moments_s)]


class GpuTimeMeter:
    """Measures seconds on the current CUDA stream, without waiting for it in between."""

    def begin(self) -> None:
        """Start measuring a step."""
        torch.cuda.synchronize()
        self._events: list[torch.cuda.Event] = []
        self.record()

    def record(self) -> None:
        """End an interval and begin the next one."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def intervals(self) -> list[float]:
        """Return the seconds of each interval."""
        torch.cuda.synchronize()
        return [float(one.elapsed_time(next_)) / 1e3 for one, next_ in pairwise(self._events)]


class GpuPeakMeter:
    """Measures the peak allocated bytes of each interval, above those at the start of the step."""

    def begin(self) -> None:
        """Start measuring a step."""
        torch.cuda.synchronize()
        self._base = torch.cuda.memory_allocated()
        self._peak_bytes: list[float] = []
        torch.cuda.reset_peak_memory_stats()

    def record(self) -> None:
        """End an interval and begin the next one."""
        self._peak_bytes.append(float(torch.cuda.max_memory_allocated() - self._base))
        torch.cuda.reset_peak_memory_stats()

    def intervals(self) -> list[float]:
        """Return the peak bytes of each interval."""
        return self._peak_bytes


class CpuPeakMeter(LiveBytesTracker):
    """Measures the same on a CPU; call `intervals` after leaving the context."""

    def begin(self) -> None:
        """Start measuring a step."""
        self._moments_us = [time.time_ns() / 1e3]

    def record(self) -> None:
        """End an interval and begin the next one."""
        self._moments_us.append(time.time_ns() / 1e3)

    def intervals(self) -> list[float]:
        """Return the peak bytes of each interval."""
        return peaks_per_interval(self._memory_changes, self._moments_us)


def peaks_per_interval(changes: Iterable[MemoryChange], moments_us: Sequence[float]) -> list[float]:
    """Return the peak live bytes between consecutive times, above those at the first time."""
    ordered = sorted(changes, key=lambda change: (change[0], -change[1]))
    base = live = sum(num_bytes for when_us, num_bytes in ordered if when_us <= moments_us[0])
    index = sum(when_us <= moments_us[0] for when_us, _ in ordered)
    peaks: list[float] = []
    for end_us in moments_us[1:]:
        peak = live
        while index < len(ordered) and ordered[index][0] <= end_us:
            live += ordered[index][1]
            peak = max(peak, live)
            index += 1
        peaks.append(float(peak - base))
    return peaks

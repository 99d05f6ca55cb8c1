"""The most bytes of tensors that live at once in a step, whichever thread makes or frees them.

On a GPU the allocator counts. On a CPU the profiler is asked for every allocation and release, from
before a contender is built: what it holds between steps is counted with what comes and goes, also
where no Python object shows it (DDP's buckets). PyTorch's newer profiler sees the memory of the
thread that started it alone: a strategy that frees on another thread would look larger than it is,
one that allocates there smaller. The older one is started by each thread for itself, so it is
started in all that begin while somebody counts.

Threads that were there before, and those of a back end, are not followed: what they free of the
contender's is taken to live on.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch._C import _autograd as profiler
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from stretto.errors import StrettoError
from stretto.measure.interleave import Contender

_WARM_UP = 2
_PATIENCE_S = 30.0
_LOOKS_S = 0.5

Change = tuple[float, int]
"""When, in microseconds, and by how many bytes the sum of what lives changed."""


def peak_bytes(make: Callable[[], Contender], device: str) -> int:
    """Return the most that lives in a steady step of what ``make`` builds; all ranks together.

    Everything it has built counts, tensors that were there before do not.
    """
    gc.collect()
    return _peak_on_gpu(make) if device == "cuda" else _peak_on_cpu(make)


def _peak_on_gpu(make: Callable[[], Contender]) -> int:
    before = _allocated()
    contender = make()
    for _ in range(_WARM_UP):
        contender()
    _settle_down()
    torch.cuda.reset_peak_memory_stats()
    contender()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    contender.rest()
    contender.close()
    del contender
    # Somebody else's may have been let go only meanwhile: that was not there before.
    return peak - min(before, _allocated())


def _allocated() -> int:
    _settle_down()
    return torch.cuda.memory_allocated()


def _settle_down() -> None:
    """Wait until only what somebody still wants is there.

    NCCL's own thread holds the tensors of a message until it looks again and finds it over.
    """
    gc.collect()
    torch.cuda.synchronize()
    time.sleep(_LOOKS_S)
    gc.collect()


def _peak_on_cpu(make: Callable[[], Contender]) -> int:
    with LiveBytes() as live:
        contender = make()
        for _ in range(_WARM_UP):
            contender()
        with live.looking():
            contender()
        contender.rest()
        contender.close()
    return live.peak


class LiveBytes:
    """Follows CPU tensors between entering and leaving, on this thread and those begun since."""

    def __init__(self) -> None:
        self.peak = 0
        """The most in the stretch that was looked at; known after leaving."""
        self._changes: list[Change] = []
        self._threads: list[threading.Thread] = []
        self._window = (0.0, 0.0)
        self._plain_run = threading.Thread.run

    def __enter__(self) -> Self:
        self._plain_run = plain_run = threading.Thread.run

        def run(thread: threading.Thread) -> None:
            self._threads.append(thread)
            with self._following():
                plain_run(thread)

        threading.Thread.run = run  # type: ignore[method-assign, assignment]
        profiler._enable_profiler_legacy(_config())
        return self

    def __exit__(self, failed: type[BaseException] | None, *_failure: object) -> None:
        threading.Thread.run = self._plain_run  # type: ignore[method-assign]
        self._changes += _changes(profiler._disable_profiler_legacy())
        if failed is not None:
            return
        for thread in self._threads:
            thread.join(_PATIENCE_S)
            if thread.is_alive():
                raise StrettoError(
                    f"thread {thread.name} goes on after its contender was closed: what it "
                    "allocated cannot be counted"
                )
        self.peak = peak_between(self._changes, *self._window)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look for the most in here; once."""
        start_us = time.time_ns() / 1e3
        yield
        self._window = (start_us, time.time_ns() / 1e3)

    @contextmanager
    def _following(self) -> Iterator[None]:
        profiler._enable_profiler_legacy(_config())
        try:
            yield
        finally:
            self._changes += _changes(profiler._disable_profiler_legacy())


def peak_between(changes: Iterable[Change], start_us: float, end_us: float) -> int:
    """Return the most that lives between two moments, all that there was at the first included."""
    live = peak = at_start = 0
    # At one moment, what comes is counted before what goes: rather too much than too little.
    for when_us, num_bytes in sorted(changes, key=lambda change: (change[0], -change[1])):
        if when_us > end_us:
            break
        live += num_bytes
        if when_us < start_us:
            at_start = live
        else:
            peak = max(peak, live)
    return max(peak, at_start)


def _config() -> ProfilerConfig:
    return ProfilerConfig(
        ProfilerState.CPU,
        report_input_shapes=False,
        profile_memory=True,
        with_stack=False,
        with_flops=False,
        with_modules=False,
        experimental_config=_ExperimentalConfig(),
    )


def _changes(threads: Iterable[Iterable[Any]]) -> list[Change]:
    return [
        (event.start_us(), event.cpu_memory_usage())
        for events in threads
        for event in events
        if event.kind() == "memory_alloc"
    ]

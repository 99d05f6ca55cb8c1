"""Meters of real steps: seconds, and the most bytes that live, on a CPU or on a GPU."""

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from stretto.measure.live_bytes import Change, LiveBytes


class Clock:
    """Seconds, by this process's clock."""

    def begin(self) -> None:
        """Begin with a step."""
        self._moments_s = [time.perf_counter()]

    def note(self) -> None:
        """End a stretch."""
        self._moments_s.append(time.perf_counter())

    def stretches(self) -> list[float]:
        """Return the seconds of each stretch."""
        return [end_s - start_s for start_s, end_s in pairwise(self._moments_s)]


class GPUClock:
    """Seconds of the stream that computes; nothing is waited for in between."""

    def begin(self) -> None:
        """Begin with a step."""
        torch.cuda.synchronize()
        self._events: list[torch.cuda.Event] = []
        self.note()

    def note(self) -> None:
        """End a stretch."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def stretches(self) -> list[float]:
        """Return the seconds of each stretch."""
        torch.cuda.synchronize()
        return [float(one.elapsed_time(next_)) / 1e3 for one, next_ in pairwise(self._events)]


class GPUPeaks:
    """The most that the allocator has given out in a stretch, above the beginning."""

    def begin(self) -> None:
        """Begin with a step."""
        torch.cuda.synchronize()
        self._base = torch.cuda.memory_allocated()
        self._most: list[float] = []
        torch.cuda.reset_peak_memory_stats()

    def note(self) -> None:
        """End a stretch."""
        self._most.append(float(torch.cuda.max_memory_allocated() - self._base))
        torch.cuda.reset_peak_memory_stats()

    def stretches(self) -> list[float]:
        """Return the most bytes of each stretch."""
        return self._most


class CPUPeaks(LiveBytes):
    """The same, by what `LiveBytes` sees; known after leaving it."""

    def begin(self) -> None:
        """Begin with a step."""
        self._moments_us = [time.time_ns() / 1e3]

    def note(self) -> None:
        """End a stretch."""
        self._moments_us.append(time.time_ns() / 1e3)

    def stretches(self) -> list[float]:
        """Return the most bytes of each stretch."""
        return peaks_along(self._changes, self._moments_us)


def peaks_along(changes: Iterable[Change], moments_us: Sequence[float]) -> list[float]:
    """Return the most that lives between each two moments, above what lives at the first."""
    ordered = sorted(changes, key=lambda change: (change[0], -change[1]))
    base = live = sum(num_bytes for when_us, num_bytes in ordered if when_us <= moments_us[0])
    place = sum(when_us <= moments_us[0] for when_us, _ in ordered)
    found: list[float] = []
    for end_us in moments_us[1:]:
        most = live
        while place < len(ordered) and ordered[place][0] <= end_us:
            live += ordered[place][1]
            most = max(most, live)
            place += 1
        found.append(float(most - base))
    return found

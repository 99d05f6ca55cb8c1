"""The interface between the training loop and a data set: `SampleSource`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostContext:
    """A rank's position on its host, for sources that share memory or files there."""

    local_rank: int
    local_size: int
    key: str
    """Equal on all ranks of a run, and different in every other run."""
    barrier: Callable[[], None]
    """A barrier of all ranks; every rank must call it equally often."""


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that could not be read, and the reason in one line."""

    sample: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadStatistics:
    """Counts of the samples that a source read since the last `SampleSource.take_statistics`."""

    decoded: int = 0
    cached: int = 0
    """Samples that were taken from the cache instead of being decoded."""
    skipped: tuple[SkippedSample, ...] = ()
    """In the order of reading; a bad sample is listed each time it was requested."""


class SampleSource(Protocol):
    """Samples by index; the same (index, epoch) always gives the same bits."""

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch; indices are smaller than this."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifies the samples: equal on two ranks only if both would read the same data."""
        ...

    @property
    def max_corrupt_files(self) -> float:
        """Largest fraction of samples that may be unreadable before the run ends with an error."""
        ...

    @property
    def fills_cache(self) -> bool:
        """Whether this epoch writes to the host's cache, so that the next epoch can read it."""
        ...

    def batch(self, indices: NDArray[np.int64], epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the readable samples, in the order of ``indices``.

        The prefetcher calls this from a background thread. Unreadable samples are left out, so
        there may be fewer rows than indices; `take_statistics` reports which and why. ``indices``
        may be empty: a rank without samples needs tensors of length 0 with the other dimensions of
        an ordinary batch.
        """
        ...

    def start(self, host: HostContext) -> None:
        """Prepare for many batches; all ranks call this together, once, before the first step.

        `batch` may be called earlier for a few batches, for example to try the model.
        """
        ...

    def close(self) -> None:
        """Release what `start` acquired; may be called more than once, or without `start`."""
        ...

    def take_statistics(self) -> ReadStatistics:
        """Return the statistics since the last call; safe to call from any thread."""
        ...


class StatelessSource:
    """Base of sources without files or processes; its methods do nothing."""

    max_corrupt_files = 1.0
    fills_cache = False

    def start(self, host: HostContext) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def take_statistics(self) -> ReadStatistics:
        """Return empty statistics."""
        return ReadStatistics()

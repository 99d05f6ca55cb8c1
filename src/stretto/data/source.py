"""What the loop asks of a data set: its size, the tensors of a set of samples, an account."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands among those of its host, for a source that shares something there."""

    local_rank: int
    local_size: int
    key: str
    """Equal on all ranks of a run and unlike that of any other run."""
    meet: Callable[[], None]
    """A barrier of all ranks; each calls it as often as every other."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that could not be read, and why, in one line."""

    sample: str
    reason: str


@dataclass(frozen=True, slots=True)
class Account:
    """What a source did since it was last asked."""

    decoded: int = 0
    cached: int = 0
    """Samples that were taken from the cache instead of being decoded."""
    skipped: tuple[Skipped, ...] = ()
    """In the order they were met; a bad sample is listed each time it is asked for."""


class Source(Protocol):
    """Samples that can be asked for by index; one (index, epoch) always gives the same bits."""

    @property
    def num_samples(self) -> int:
        """Samples in one epoch; indices are below it."""
        ...

    @property
    def fingerprint(self) -> str:
        """What the samples are: equal on two ranks only if they would read the same data."""
        ...

    @property
    def bad_limit(self) -> float:
        """Largest share of samples that may be bad before the run is not worth going on with."""
        ...

    @property
    def fills_cache(self) -> bool:
        """What is read in this epoch will be at hand, for all ranks of the host, in the next."""
        ...

    def batch(self, indices: NDArray[np.int64], epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, in the order of ``indices``, without what cannot be read.

        Called from a background thread. There are fewer rows than indices when a sample is bad;
        `take_account` says which and why. ``indices`` may be empty: a rank without samples
        needs tensors of length 0 whose other dimensions are those of any batch.
        """
        ...

    def start(self, place: Place) -> None:
        """Make ready for many batches; all ranks together, once, before the first step.

        A few batches may be asked for earlier, for a trial of the model.
        """
        ...

    def close(self) -> None:
        """End what `start` has started; may be called more than once, or without `start`."""
        ...

    def take_account(self) -> Account:
        """Return what happened since the last call, from any thread."""
        ...


class SelfContained:
    """The part of a source's contract that is empty where no file or process stands behind it."""

    bad_limit = 1.0
    fills_cache = False

    def start(self, place: Place) -> None:
        """Do nothing: samples are at hand at any time."""

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def take_account(self) -> Account:
        """Return that nothing was decoded, cached or skipped."""
        return Account()

"""What the loop asks of a data set: its size, and the tensors of a set of samples."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Source(Protocol):
    """Samples that can be asked for by index; one index always gives the same bits."""

    @property
    def num_samples(self) -> int:
        """Samples in one epoch; indices are below it."""
        ...

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, one row per index, in the order of ``indices``.

        Called from a background thread. ``indices`` may be empty: a rank without samples
        needs tensors of length 0 whose other dimensions are those of any batch.
        """
        ...

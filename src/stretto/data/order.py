"""The order of samples: a pure function of (seed, epoch, position), the same at any world size.

No order is stored: each position is mapped through a keyed permutation. The state of a run's data
is therefore its step number. A run that continues with another number of ranks still reads each
sample exactly once an epoch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.data.hashing import U64, counters, derive_key, mix64
from stretto.errors import ConfigError

_ROUNDS = 8
"""Half rounds of the Feistel network: 3 already pass the statistical tests, 2 fail them."""


@dataclass(frozen=True, slots=True, eq=False)
class RankSamples:
    """The samples that one rank computes in one step; ``samples`` may be empty."""

    samples: NDArray[np.int64]
    epoch: int = 0
    """The pass over the data, from 0; a source may augment a sample differently in each epoch."""


def samples_at(
    epoch_indices: NDArray[np.int64], *, num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return the samples at positions ``epoch_indices`` of the epoch, each in [0, num_samples).

    The permutation is a Feistel network over a grid of about sqrt(N) by sqrt(N) cells. The grid has
    up to sqrt(N) cells too many. A result in one of these is permuted again until it is a sample
    (cycle walking: Black and Rogaway, 2002, doi:10.1007/3-540-45760-7_9). Time and memory are
    proportional to ``epoch_indices``, not to N.

    Raises:
        ConfigError: A position is outside the epoch.
    """
    if epoch_indices.size and not 0 <= epoch_indices.min() <= epoch_indices.max() < num_samples:
        raise ConfigError(
            f"positions {epoch_indices.min()} to {epoch_indices.max()} are outside an epoch of "
            f"{num_samples} samples; a position counts from the start of its own epoch"
        )
    rows = math.isqrt(max(num_samples, 1) - 1) + 1
    cols = -(-num_samples // rows)
    keys = mix64(derive_key(seed, epoch) + counters(0, _ROUNDS))
    cells = epoch_indices.astype(np.uint64)
    outside = np.arange(cells.size)
    while outside.size:
        cells[outside] = _feistel(cells[outside], rows, cols, keys)
        outside = outside[cells[outside] >= num_samples]
    return cells.astype(np.int64)


def steps_per_epoch(num_samples: int, batch: int) -> int:
    """Return the number of steps that cover ``num_samples``; the last one may be smaller."""
    return -(-num_samples // batch)


def rank_samples(  # noqa: PLR0913 - the order depends on exactly these seven
    step_in_epoch: int,
    *,
    batch: int,
    rank: int,
    size: int,
    num_samples: int,
    seed: int,
    epoch: int,
) -> RankSamples:
    """Return the samples that ``rank`` of ``size`` computes in one step of ``batch`` samples.

    The step covers positions [step * batch, (step + 1) * batch), cut off at the end of the epoch,
    at any world size. Ranks take these positions in turn (rank, rank + size, ...).
    """
    start = step_in_epoch * batch
    stop = min(start + batch, num_samples)
    epoch_indices = np.arange(start + rank, stop, size, dtype=np.int64)
    samples = samples_at(epoch_indices, num_samples=num_samples, seed=seed, epoch=epoch)
    return RankSamples(samples, epoch)


class DistributedBatchSampler:
    """Batches of sample indices for this rank: the ``batch_sampler`` of a plain ``DataLoader``.

    ``batch`` counts samples over all ranks. Every rank gets the same number of batches and at least
    one sample in each, so that the ranks of an ordinary loop make the same number of steps. A last
    batch that is too small for that is merged into the one before. After a complete iteration the
    sampler moves on to the next epoch.
    """

    def __init__(
        self, num_samples: int, batch: int, *, rank: int, size: int, seed: int = 0
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is not in a world of {size}; ranks count from 0")
        if min(num_samples, batch) < size:
            raise ConfigError(
                f"{num_samples} samples in batches of {batch} cannot give each of {size} ranks "
                f"one sample a step; use at most {min(num_samples, batch)} ranks or more samples"
            )
        self._num_samples = num_samples
        self._batch = batch
        self._rank = rank
        self._size = size
        self._seed = seed
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads, for example after a resume."""
        self._epoch = epoch

    def __len__(self) -> int:
        steps, rest = divmod(self._num_samples, self._batch)
        # If fewer samples are left than there are ranks, they join the last full batch.
        return steps + (rest >= self._size)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, last = self._epoch, len(self) - 1
        for step in range(len(self)):
            start = step * self._batch
            stop = self._num_samples if step == last else start + self._batch
            epoch_indices = np.arange(start + self._rank, stop, self._size, dtype=np.int64)
            samples = samples_at(
                epoch_indices, num_samples=self._num_samples, seed=self._seed, epoch=epoch
            )
            yield samples.tolist()
        if self._epoch == epoch:  # unless `set_epoch` was called during the iteration
            self._epoch = epoch + 1


def _feistel(cells: U64, rows: int, cols: int, keys: U64) -> U64:
    """Return a keyed permutation of the cells of a grid; each half round shifts one coordinate.

    The shift of a row depends on the column alone, and the other way round. Every half round can
    therefore be undone, so the whole is a bijection for any hash.
    """
    row, col = cells // np.uint64(cols), cells % np.uint64(cols)
    for half_round, key in enumerate(keys):
        if half_round % 2:
            col = (col + _shift(row, key)) % np.uint64(cols)
        else:
            row = (row + _shift(col, key)) % np.uint64(rows)
    return row * np.uint64(cols) + col


def _shift(coordinate: U64, key: np.uint64) -> U64:
    # Only 63 bits are used, so that adding a coordinate cannot wrap around 2^64. A sum that
    # wraps before the modulo would map two cells to one.
    return mix64(coordinate ^ key) >> np.uint64(1)

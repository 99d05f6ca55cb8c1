"""The order of samples: a pure function of (seed, epoch, position), the same at any world size.

Nothing is stored and nothing is drawn: a position is sent through a keyed permutation, so the
state of a run's data is its step number, and a run that continues with other ranks still sees
each sample exactly once an epoch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.data.hashing import U64, counters, derive_key, mix64
from stretto.errors import ConfigError

_ROUNDS = 8
"""Half rounds of the Feistel network; 3 already pass the statistics in the tests, 2 do not."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank computes of one step; ``samples`` may be empty, the step goes on."""

    samples: NDArray[np.int64]
    epoch: int = 0
    """Which pass over the data this is: a source may show a sample differently in each."""


def sample_at(
    positions: NDArray[np.int64], *, num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return the samples that stand at ``positions`` of the epoch, in [0, num_samples).

    A Feistel network over a grid of about sqrt(N) by sqrt(N) cells; a result in one of the
    fewer than sqrt(N) cells too many is sent through again until it falls inside (Black and
    Rogaway, 2002, doi:10.1007/3-540-45760-7_9). Memory and time go with ``positions``, not N.
    """
    if positions.size and not 0 <= positions.min() <= positions.max() < num_samples:
        raise ConfigError(
            f"positions {positions.min()} to {positions.max()} are outside an epoch of "
            f"{num_samples} samples; a position counts from the start of its own epoch"
        )
    rows = math.isqrt(max(num_samples, 1) - 1) + 1
    cols = -(-num_samples // rows)
    keys = mix64(derive_key(seed, epoch) + counters(0, _ROUNDS))
    cells = positions.astype(np.uint64)
    outside = np.arange(cells.size)
    while outside.size:
        cells[outside] = _feistel(cells[outside], rows, cols, keys)
        outside = outside[cells[outside] >= num_samples]
    return cells.astype(np.int64)


def steps_per_epoch(num_samples: int, batch: int) -> int:
    """Return the steps that cover ``num_samples``, the last one ragged where it must be."""
    return -(-num_samples // batch)


def step_share(  # noqa: PLR0913 - these seven are what an order depends on, and all of it
    step_in_epoch: int,
    *,
    batch: int,
    rank: int,
    size: int,
    num_samples: int,
    seed: int,
    epoch: int,
) -> Share:
    """Return the samples that ``rank`` of ``size`` computes in one step of ``batch`` samples.

    The step covers positions [step * batch, (step + 1) * batch), cut off at the end of the
    epoch, whatever the world size; ranks take them in turn.
    """
    start = step_in_epoch * batch
    stop = min(start + batch, num_samples)
    positions = np.arange(start + rank, stop, size, dtype=np.int64)
    samples = sample_at(positions, num_samples=num_samples, seed=seed, epoch=epoch)
    return Share(samples, epoch)


class OrderedBatches:
    """Batches of sample indices for this rank: the ``batch_sampler`` of a plain ``DataLoader``.

    ``batch`` counts samples over all ranks. Every rank gets the same number of batches and at
    least one sample in each, so that ranks in an ordinary loop stay in step: a last batch too
    small for that is joined to the one before. A pass that is iterated to its end moves on to
    the next epoch by itself.
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
        """The epoch that the next pass goes through."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, as after a resume."""
        self._epoch = epoch

    def __len__(self) -> int:
        steps, rest = divmod(self._num_samples, self._batch)
        # A rest of fewer samples than ranks goes into the last full batch.
        return steps + (rest >= self._size)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, last = self._epoch, len(self) - 1
        for step in range(len(self)):
            start = step * self._batch
            stop = self._num_samples if step == last else start + self._batch
            positions = np.arange(start + self._rank, stop, self._size, dtype=np.int64)
            samples = sample_at(
                positions, num_samples=self._num_samples, seed=self._seed, epoch=epoch
            )
            yield samples.tolist()
        if self._epoch == epoch:  # not chosen anew during the pass
            self._epoch = epoch + 1


def _feistel(cells: U64, rows: int, cols: int, keys: U64) -> U64:
    """Return a keyed permutation of the cells of a grid: each half round shifts one coordinate.

    The shift of a row depends on the column alone and the other way round, which is why
    every half round can be undone and the whole is a bijection for any hash.
    """
    row, col = cells // np.uint64(cols), cells % np.uint64(cols)
    for half_round, key in enumerate(keys):
        if half_round % 2:
            col = (col + _shift(row, key)) % np.uint64(cols)
        else:
            row = (row + _shift(col, key)) % np.uint64(rows)
    return row * np.uint64(cols) + col


def _shift(coordinate: U64, key: np.uint64) -> U64:
    # One bit is given up so that adding a coordinate cannot wrap around 2^64: a sum that
    # wraps before the modulo would send two cells to one.
    return mix64(coordinate ^ key) >> np.uint64(1)

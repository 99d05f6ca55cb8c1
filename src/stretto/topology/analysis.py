"""What a topology is worth: stochastic or not, rounds to the mean, spectral gap, messages.

Makes n x n matrices: for looking at a topology, not for running it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.topology.mixing import Mixing, Topology

Matrix = NDArray[np.float64]
"""[n, n]; row i is what rank i hears."""

_EXACT = 1e-9
"""Two numbers nearer than this are equal but for rounding."""


class Counts(NamedTuple):
    """Messages of one rank in one round of one segment."""

    sends: int
    receives: int


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a topology at one size."""

    name: str
    size: int
    period: int | None
    """Rounds after which peers repeat; None where they are drawn."""
    doubly_stochastic: bool
    rounds_to_consensus: int | None
    """Rounds from step 0 on after which all have the mean exactly; None where none is found."""
    spectral_gap: float | None
    most_messages: Counts
    """The most that one rank sends, and receives, in one round."""


def report(topology: Topology, size: int) -> Report:
    """Return what is known of ``topology`` among ``size`` ranks."""
    rounds = range(topology.period(size) or _enough(size))
    counted = [each for step in rounds for each in counts(topology, size, step)]
    return Report(
        topology.name,
        size,
        topology.period(size),
        all(is_doubly_stochastic(matrix(topology, size, step)) for step in rounds),
        rounds_to_consensus(topology, size),
        spectral_gap(topology, size),
        Counts(max(each.sends for each in counted), max(each.receives for each in counted)),
    )


def matrix(mixing: Mixing, size: int, step: int = 0, segment: int = 0) -> Matrix:
    """Return the matrix of one round."""
    dense = np.zeros((size, size))
    for rank in range(size):
        peers = mixing(rank, size, step, segment)
        dense[rank, rank] = peers.own
        for edge in peers.receives:
            dense[rank, edge.rank] += edge.weight
    return dense


def counts(mixing: Mixing, size: int, step: int = 0, segment: int = 0) -> list[Counts]:
    """Return the messages of every rank in one round of one segment."""
    peers = [mixing(rank, size, step, segment) for rank in range(size)]
    return [Counts(len(each.sends), len(each.receives)) for each in peers]


def is_column_stochastic(dense: Matrix) -> bool:
    """Tell whether nobody gives away more or less than there is: the sum over ranks stays."""
    return bool(np.all(dense >= 0) and np.allclose(dense.sum(axis=0), 1.0, rtol=0, atol=_EXACT))


def is_doubly_stochastic(dense: Matrix) -> bool:
    """Tell whether, besides, everybody goes on with a mean: no push-sum is needed."""
    return is_column_stochastic(dense) and is_column_stochastic(dense.T)


def rounds_to_consensus(topology: Topology, size: int, limit: int | None = None) -> int | None:
    """Return after how many rounds from step 0 all have the mean exactly, None if not by ``limit``.

    Without a limit, a whole period and at least 2 log2 n rounds are followed.
    """
    wanted = _mean(size)
    product = np.eye(size)
    if np.allclose(product, wanted):
        return 0
    if limit is None:
        limit = max(topology.period(size) or 1, _enough(size))
    for step in range(limit):
        product = matrix(topology, size, step) @ product
        if np.allclose(product, wanted, rtol=0, atol=_EXACT):
            return step + 1
    return None


def spectral_gap(topology: Topology, size: int, samples: int = 1000) -> float | None:
    """Return 1 - the factor by which a round shrinks disagreement, in the worst direction.

    Of peers that repeat: the second largest singular value of the product over one period, as a
    mean per round; 1 where one period is exact. Of drawn ones: the root of the largest expected
    square, over the first ``samples`` steps, which errs a little towards a smaller gap. None where
    rows do not sum to one: what push-sum does is not said by singular values.
    """
    if not topology.doubly_stochastic:
        return None
    if topology.period(size) is None:
        return 1.0 - _expected_factor(topology, size, samples)
    return 1.0 - _factor_of_period(topology, size)


def _factor_of_period(topology: Topology, size: int) -> float:
    rounds = topology.period(size) or 1
    product = np.eye(size)
    for step in range(rounds):
        product = matrix(topology, size, step) @ product
    left = float(np.linalg.norm(product - _mean(size), ord=2))
    return 0.0 if left < _EXACT else left ** (1.0 / rounds)


def _expected_factor(topology: Topology, size: int, samples: int) -> float:
    total = np.zeros((size, size))
    for step in range(samples):
        left = matrix(topology, size, step) - _mean(size)
        total += left.T @ left
    largest = float(np.linalg.eigvalsh(total / samples)[-1])
    return float(np.sqrt(max(0.0, largest)))


def _mean(size: int) -> Matrix:
    return np.full((size, size), 1.0 / size)


def _enough(size: int) -> int:
    return 2 * size.bit_length()

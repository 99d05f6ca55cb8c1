"""What one rank does in one round of gossip: whom it tells, whom it hears, and with what weights.

Note: weights. Let W be the matrix of a round, so that rank i goes on with sum_j W_ij x_j. An entry
W_ij off the diagonal is an edge from j to i, and both ends know it by the same number: it is in
`sends` of j (under i) and in `receives` of i (under j); W_ii is `own`. So

- ``own`` and the weights of `sends` are column j: the shares in which a rank gives its value
  away. They sum to one in every topology, so no value is lost and the sum over ranks stays.
- ``own`` and the weights of `receives` are row i. Where these sum to one too (doubly
  stochastic), every rank goes on with a weighted mean and nothing more is needed. Where they do
  not, a rank mixes a scalar that began as 1 in the same way and divides by it (push-sum).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from stretto.errors import ConfigError


class Edge(NamedTuple):
    """A peer, and the weight that the value on its way has where it arrives."""

    rank: int
    weight: float


@dataclass(frozen=True, slots=True)
class Peers:
    """What one rank does in one round; see the note on weights above."""

    own: float
    """What the rank's value weighs for itself."""
    sends: tuple[Edge, ...] = ()
    """Whom it tells, and what its value weighs there."""
    receives: tuple[Edge, ...] = ()
    """Whom it hears, and what their values weigh here."""


class Mixing(Protocol):
    """Peers and weights of one rank in one round, which every rank computes alike.

    ``step`` counts rounds of gossip: whoever mixes only now and then passes the number of the
    mixing. ``segment`` is the part of the model that is mixed; only drawn peers depend on it.
    Takes time of the order of the rank's peers, or of ``size``; never makes a matrix.
    """

    def __call__(self, rank: int, size: int, step: int, segment: int) -> Peers:
        """Return what ``rank`` of ``size`` does; with one rank, nothing."""
        ...


def _once(_size: int) -> int:
    return 1


def _accepts(_size: int) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Topology:
    """A mixing with what is known of it beforehand; is itself a mixing, which checks its input."""

    name: str
    mixing: Mixing
    period: Callable[[int], int | None] = _once
    """Rounds after which the peers repeat, by size; None where they are drawn."""
    refuses: Callable[[int], str | None] = _accepts
    """Why it cannot be had at this size, and what would be possible; None where it can."""
    doubly_stochastic: bool = True
    """Whether rows sum to one too; where they do not, the mean needs push-sum."""

    def check(self, size: int) -> None:
        """Raise ConfigError, with what would be possible, where ``size`` ranks cannot have it."""
        if size < 1:
            raise ConfigError(f"{self.name}: {size} ranks cannot talk; there is at least 1")
        if reason := self.refuses(size):
            raise ConfigError(f"{self.name}: {reason}")

    def __call__(self, rank: int, size: int, step: int = 0, segment: int = 0) -> Peers:
        """Return what ``rank`` of ``size`` does in round ``step`` of ``segment``."""
        self.check(size)
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is not in a world of {size}; ranks count from 0")
        return self.mixing(rank, size, step, segment)


def exchange(edges: Sequence[Edge]) -> Peers:
    """Return the round of a rank that tells whom it hears, each with the same weight both ways."""
    both = tuple(edges)
    return Peers(1.0 - sum(edge.weight for edge in both), both, both)


def shifted(edges: Sequence[Edge], first: int, stride: int = 1) -> tuple[Edge, ...]:
    """Return edges between places as edges between ranks: place p is rank first + stride * p."""
    return tuple(Edge(first + stride * edge.rank, edge.weight) for edge in edges)

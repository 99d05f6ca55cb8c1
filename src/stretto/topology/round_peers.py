"""The types of a topology: a rank's peers in one round of gossip, and the weight of each.

`stretto.topology.analysis` makes matrices of them.

Note: weights. Let W be the matrix of a round, so that rank i continues with sum_j W_ij x_j. W_ii is
`self_weight`. An entry W_ij off the diagonal is an edge from j to i. Both ranks have it with the
same weight: rank j in `sends` (for peer i), and rank i in `receives` (for peer j).

- ``self_weight`` and the weights of `sends` of rank j are column j: the fractions into which the
  rank splits its value. They sum to 1 in every topology, so the sum over ranks is preserved.
- ``self_weight`` and the weights of `receives` of rank i are row i. Where rows also sum to 1
  (doubly stochastic), every rank continues with a weighted mean. Where they do not, a rank mixes a
  scalar that started as 1 in the same way and divides by it (push-sum).

`grouped` makes a topology of groups: the exact mean within a group of consecutive ranks, and gossip
between groups. As one round of single ranks, its matrix is the Kronecker product of the groups'
matrix and the mean within a group. Strategies do not run it so: they average within a group by a
collective, and let groups exchange by the topology between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.errors import ConfigError


class Edge(NamedTuple):
    """A peer, and the weight of the sender's value at the receiver."""

    rank: int
    weight: float


@dataclass(frozen=True, slots=True)
class RoundPeers:
    """The peers and weights of one rank in one round; see the note on weights above."""

    self_weight: float
    """Weight of the rank's own value."""
    sends: tuple[Edge, ...] = ()
    """The receivers, with the weight of this rank's value there."""
    receives: tuple[Edge, ...] = ()
    """The senders, with the weight of their values here."""


class PeerFunction(Protocol):
    """A function that returns the peers and weights of one rank in one round.

    It is pure: every rank computes the same result. ``step`` counts rounds of gossip, not optimizer
    steps. ``segment`` is the index of the model's segment; only random peers depend on it. The time
    is of the order of the rank's peers or of ``size``; it never makes a matrix.
    """

    def __call__(self, rank: int, size: int, step: int, segment: int) -> RoundPeers:
        """Return peers and weights of ``rank`` of ``size``; a single rank has no peers."""
        ...


def _period_of_one(_size: int) -> int:
    return 1


def _no_size_error(_size: int) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Topology:
    """A mixing with its properties. It is callable as a mixing and then checks its arguments."""

    name: str
    mixing: PeerFunction
    period: Callable[[int], int | None] = _period_of_one
    """Size -> rounds after which the peers repeat; None for random peers."""
    size_error: Callable[[int], str | None] = _no_size_error
    """Size -> why the topology does not exist for it, and which sizes do; None where it exists."""
    doubly_stochastic: bool = True
    """Whether rows sum to 1, too; otherwise the mean needs push-sum."""

    def check(self, size: int) -> None:
        """Raise ConfigError, with possible sizes, if the topology does not exist for ``size``."""
        if size < 1:
            raise ConfigError(f"{self.name}: {size} ranks are too few; at least 1 is needed")
        if reason := self.size_error(size):
            raise ConfigError(f"{self.name}: {reason}")

    def __call__(self, rank: int, size: int, step: int = 0, segment: int = 0) -> RoundPeers:
        """Return peers and weights of ``rank`` of ``size`` in round ``step`` of ``segment``."""
        self.check(size)
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is not in a world of {size}; ranks count from 0")
        return self.mixing(rank, size, step, segment)


def symmetric_peers(edges: Sequence[Edge]) -> RoundPeers:
    """Return the peers of a rank that sends and receives along ``edges`` with equal weights."""
    edge_tuple = tuple(edges)
    return RoundPeers(1.0 - sum(edge.weight for edge in edge_tuple), edge_tuple, edge_tuple)


def shift_edges(edges: Sequence[Edge], first: int, stride: int = 1) -> tuple[Edge, ...]:
    """Return ``edges`` with every peer p replaced by first + stride * p."""
    return tuple(Edge(first + stride * edge.rank, edge.weight) for edge in edges)


class StackedRound(NamedTuple):
    """One round of all ranks as arrays, for values of all ranks stacked; row i is of rank i.

    A rank with fewer senders than others has itself as further senders, with weight 0.
    """

    self_weight: NDArray[np.float64]
    """[n]: weight of a rank's own value."""
    who: NDArray[np.int64]
    """[n, k]: the senders."""
    weights: NDArray[np.float64]
    """[n, k]: weights of the senders' values."""


def stacked_round(mixing: PeerFunction, size: int, step: int, segment: int = 0) -> StackedRound:
    """Return one round of ``size`` ranks as arrays."""
    peers = [mixing(rank, size, step, segment) for rank in range(size)]
    max_peers = max(len(each.receives) for each in peers)
    who = np.repeat(np.arange(size)[:, None], max_peers, axis=1)
    weights = np.zeros((size, max_peers))
    for rank, each in enumerate(peers):
        for column, edge in enumerate(each.receives):
            who[rank, column], weights[rank, column] = edge
    return StackedRound(np.array([each.self_weight for each in peers]), who, weights)


def grouped(between: Topology, groups: int) -> Topology:
    """Return the topology of ranks that average in ``groups`` equal groups and mix by ``between``.

    One group is the same as `complete`; as many groups as ranks are ``between`` itself. The speed
    of consensus depends on the number of groups, not of ranks.
    """
    if groups < 1:
        raise ConfigError(f"groups must be at least 1, got {groups}")
    return Topology(
        f"{between.name} between {groups} groups",
        partial(_grouped_peers, between, groups),
        lambda _size: between.period(groups),
        partial(_grouped_size_error, between, groups),
        between.doubly_stochastic,
    )


def ranks_of_group(group: int, width: int) -> range:
    """Return the ranks of a group of ``width`` ranks."""
    return range(group * width, (group + 1) * width)


def _grouped_peers(
    between: Topology, groups: int, rank: int, size: int, step: int, segment: int
) -> RoundPeers:
    width = size // groups
    group = rank // width
    peers = between.mixing(group, groups, step, segment)
    self_weight = peers.self_weight / width
    inside = [Edge(other, self_weight) for other in ranks_of_group(group, width) if other != rank]
    return RoundPeers(
        self_weight,
        (*inside, *_edges_to_members(peers.sends, width)),
        (*inside, *_edges_to_members(peers.receives, width)),
    )


def _edges_to_members(edges: tuple[Edge, ...], width: int) -> list[Edge]:
    """Return an edge to every rank of a group for each edge to the group."""
    return [
        Edge(member, edge.weight / width)
        for edge in edges
        for member in ranks_of_group(edge.rank, width)
    ]


def possible_group_counts(size: int) -> str:
    """Return, as text, the numbers of equal groups that ``size`` ranks can form."""
    possible = [str(n) for n in range(1, size + 1) if size % n == 0]
    last = f" or {possible.pop()}" if len(possible) > 1 else ""
    return f"{', '.join(possible)}{last}"


def _grouped_size_error(between: Topology, groups: int, size: int) -> str | None:
    if size % groups:
        return (
            f"{size} ranks can be {possible_group_counts(size)} groups of equal size, not {groups}"
        )
    return between.size_error(groups)

"""Analyse a topology: double stochasticity, rounds to consensus, spectral gap and messages.

Also topologies from networkx graphs, and drawings of rounds. The functions make n x n matrices;
training does not use them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from stretto.errors import ConfigError
from stretto.topology.round_peers import Edge, PeerFunction, RoundPeers, Topology

Matrix = NDArray[np.float64]
"""[n, n]; row i has the weights with which rank i averages the values of all ranks."""

_TOLERANCE = 1e-9
"""Numbers that differ by less are equal up to rounding."""

_DRAWN_ROUNDS = 4
"""Number of rounds to show of a topology with random peers."""


class MessageCounts(NamedTuple):
    """Number of messages of one rank in one round of one segment."""

    sends: int
    receives: int


@dataclass(frozen=True, slots=True)
class TopologyReport:
    """Properties of a topology at one size."""

    name: str
    size: int
    period: int | None
    """Rounds after which peers repeat; None for random peers."""
    doubly_stochastic: bool
    rounds_to_consensus: int | None
    """Rounds from step 0 until all ranks have the exact mean; None if not found."""
    spectral_gap: float | None
    """See `spectral_gap`; None where it is not defined."""
    max_messages: MessageCounts
    """Maximum numbers of messages that one rank sends and receives in one round."""


def analyze_topology(topology: Topology, size: int) -> TopologyReport:
    """Return the properties of ``topology`` for ``size`` ranks."""
    rounds = range(topology.period(size) or _rounds_to_examine(size))
    all_counts = [each for step in rounds for each in message_counts(topology, size, step)]
    return TopologyReport(
        topology.name,
        size,
        topology.period(size),
        all(is_doubly_stochastic(mixing_matrix(topology, size, step)) for step in rounds),
        rounds_to_consensus(topology, size),
        spectral_gap(topology, size),
        MessageCounts(
            max(each.sends for each in all_counts), max(each.receives for each in all_counts)
        ),
    )


def mixing_matrix(mixing: PeerFunction, size: int, step: int = 0, segment: int = 0) -> Matrix:
    """Return the mixing matrix of one round."""
    dense = np.zeros((size, size))
    for rank in range(size):
        peers = mixing(rank, size, step, segment)
        dense[rank, rank] = peers.self_weight
        for edge in peers.receives:
            dense[rank, edge.rank] += edge.weight
    return dense


def message_counts(
    mixing: PeerFunction, size: int, step: int = 0, segment: int = 0
) -> list[MessageCounts]:
    """Return the message counts of every rank in one round of one segment."""
    peers = [mixing(rank, size, step, segment) for rank in range(size)]
    return [MessageCounts(len(each.sends), len(each.receives)) for each in peers]


def is_column_stochastic(dense: Matrix) -> bool:
    """Return whether no entry is negative and columns sum to 1, which keeps the sum over ranks."""
    return bool(np.all(dense >= 0) and np.allclose(dense.sum(axis=0), 1.0, rtol=0, atol=_TOLERANCE))


def is_doubly_stochastic(dense: Matrix) -> bool:
    """Return whether all columns and rows sum to 1, so that push-sum is not needed."""
    return is_column_stochastic(dense) and is_column_stochastic(dense.T)


def rounds_to_consensus(topology: Topology, size: int, limit: int | None = None) -> int | None:
    """Return the rounds from step 0 until all ranks have the exact mean; None if over ``limit``.

    The default limit is one period, but at least 2 log2 n rounds.
    """
    target = _averaging_matrix(size)
    product = np.eye(size)
    if np.allclose(product, target):
        return 0
    if limit is None:
        limit = max(topology.period(size) or 1, _rounds_to_examine(size))
    for step in range(limit):
        product = mixing_matrix(topology, size, step) @ product
        if np.allclose(product, target, rtol=0, atol=_TOLERANCE):
            return step + 1
    return None


def spectral_gap(topology: Topology, size: int, samples: int = 1000) -> float | None:
    """Return 1 minus the factor by which a round shrinks disagreement, in the worst direction.

    For periodic peers the factor is the second largest singular value of the product over one
    period, as a geometric mean per round. The gap is 1 if one period gives the exact mean.

    For random peers the factor is the root of the largest expected square, estimated over the
    first ``samples`` steps. This estimate is slightly biased towards a smaller gap.

    Return None if rows do not sum to 1: singular values do not describe push-sum.
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
        product = mixing_matrix(topology, size, step) @ product
    deviation = float(np.linalg.norm(product - _averaging_matrix(size), ord=2))
    return 0.0 if deviation < _TOLERANCE else deviation ** (1.0 / rounds)


def _expected_factor(topology: Topology, size: int, samples: int) -> float:
    total = np.zeros((size, size))
    for step in range(samples):
        deviation = mixing_matrix(topology, size, step) - _averaging_matrix(size)
        total += deviation.T @ deviation
    largest = float(np.linalg.eigvalsh(total / samples)[-1])
    return float(np.sqrt(max(0.0, largest)))


def _averaging_matrix(size: int) -> Matrix:
    return np.full((size, size), 1.0 / size)


def _rounds_to_examine(size: int) -> int:
    return 2 * size.bit_length()


# --- Topologies from networkx graphs ---


def topology_from_graph(graph: nx.Graph) -> Topology:
    """Return a topology whose ranks, 0 to n-1, exchange along the edges of ``graph`` in each round.

    Directed graph: a rank splits its value evenly among itself and its successors. Rows sum to 1
    only if every rank has as many predecessors as successors; otherwise push-sum is needed.

    Undirected graph: Metropolis weights, 1 / (1 + the larger degree of both ends), which are doubly
    stochastic. Later changes of the graph have no effect.

    Raises:
        ConfigError: The nodes are not the ranks 0 to n-1, or the graph is not connected.
    """
    _check_graph(graph)
    size = graph.number_of_nodes()
    peers = tuple(_peers_in_graph(graph, rank) for rank in range(size))

    def mixing(rank: int, size: int, step: int, segment: int) -> RoundPeers:
        return peers[rank]

    def size_error(requested: int) -> str | None:
        return None if requested == size else f"the graph has {size} ranks, not {requested}"

    rows = [each.self_weight + sum(edge.weight for edge in each.receives) for each in peers]
    balanced = all(abs(row - 1.0) < 1e-12 for row in rows)
    return Topology("custom", mixing, size_error=size_error, doubly_stochastic=balanced)


def _peers_in_graph(graph: nx.Graph, rank: int) -> RoundPeers:
    successors = sorted(graph.successors(rank) if graph.is_directed() else graph.neighbors(rank))
    predecessors = sorted(graph.predecessors(rank)) if graph.is_directed() else successors
    sends = tuple(
        Edge(other, _edge_weight(graph, rank, other)) for other in successors if other != rank
    )
    receives = tuple(
        Edge(other, _edge_weight(graph, other, rank)) for other in predecessors if other != rank
    )
    return RoundPeers(1.0 - sum(edge.weight for edge in sends), sends, receives)


def _edge_weight(graph: nx.Graph, source: int, target: int) -> float:
    if graph.is_directed():
        return 1.0 / (1 + _num_others(graph.successors(source), source))
    return 1.0 / (1 + max(_num_others(graph.neighbors(end), end) for end in (source, target)))


def _num_others(neighbours: Iterable[int], rank: int) -> int:
    return sum(other != rank for other in neighbours)


def _check_graph(graph: nx.Graph) -> None:
    size = graph.number_of_nodes()
    if size == 0 or set(graph) != set(range(size)):
        raise ConfigError(f"the nodes of a graph of {size} must be the ranks 0 to {size - 1}")
    connected = nx.is_strongly_connected if graph.is_directed() else nx.is_connected
    if not connected(graph):
        raise ConfigError(
            "the graph is not connected: values of some ranks would never reach others"
        )


# --- Drawings ---


def round_graph(mixing: PeerFunction, size: int, step: int = 0, segment: int = 0) -> nx.DiGraph:
    """Return one round as a graph with an edge, and its ``weight``, for every message."""
    drawn = nx.DiGraph()
    drawn.add_nodes_from(range(size))
    for rank in range(size):
        for edge in mixing(rank, size, step, segment).sends:
            drawn.add_edge(rank, edge.rank, weight=edge.weight)
    return drawn


def round_lines(
    topology: Topology, size: int, rounds: int | None = None, segment: int = 0
) -> list[str]:
    """Return a line of text for each round: ``0>1`` is one message, ``0-1`` one in each direction.

    The default is one period, or four rounds of random peers, which have no period.
    """
    if rounds is None:
        rounds = topology.period(size) or _DRAWN_ROUNDS
    return [_graph_line(round_graph(topology, size, step, segment)) for step in range(rounds)]


def _graph_line(drawn: nx.DiGraph) -> str:
    mutual = [(a, b) for a, b in drawn.edges if a < b and drawn.has_edge(b, a)]
    single = [(a, b) for a, b in drawn.edges if not drawn.has_edge(b, a)]
    arrows = {**dict.fromkeys(mutual, "-"), **dict.fromkeys(single, ">")}
    return " ".join(f"{a}{arrow}{b}" for (a, b), arrow in sorted(arrows.items())) or "no messages"

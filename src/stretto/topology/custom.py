"""A topology from a graph of one's own, the same in every round."""

from collections.abc import Iterable

import networkx as nx

from stretto.errors import ConfigError
from stretto.topology.mixing import Edge, Peers, Topology


def of_graph(graph: nx.Graph) -> Topology:
    """Return the topology whose ranks, 0 to n-1, talk along the edges of a networkx ``graph``.

    A directed graph: a rank shares its value out evenly among itself and those it has an edge to.
    Rows then sum to one only where every rank hears as many as it tells, or push-sum is needed. An
    undirected one: Metropolis weights, 1 / (1 + the larger degree of both ends), doubly stochastic.
    The graph is copied; changes to it afterwards have no effect.
    """
    _check(graph)
    size = graph.number_of_nodes()
    peers = tuple(_peers(graph, rank) for rank in range(size))

    def mixing(rank: int, size: int, step: int, segment: int) -> Peers:
        return peers[rank]

    def refuses(asked: int) -> str | None:
        return None if asked == size else f"the graph has {size} ranks, not {asked}"

    rows = [each.own + sum(edge.weight for edge in each.receives) for each in peers]
    balanced = all(abs(row - 1.0) < 1e-12 for row in rows)
    return Topology("custom", mixing, refuses=refuses, doubly_stochastic=balanced)


def _peers(graph: nx.Graph, rank: int) -> Peers:
    told = sorted(graph.successors(rank) if graph.is_directed() else graph.neighbors(rank))
    heard = sorted(graph.predecessors(rank)) if graph.is_directed() else told
    sends = tuple(Edge(other, _weight(graph, rank, other)) for other in told if other != rank)
    receives = tuple(Edge(other, _weight(graph, other, rank)) for other in heard if other != rank)
    return Peers(1.0 - sum(edge.weight for edge in sends), sends, receives)


def _weight(graph: nx.Graph, source: int, target: int) -> float:
    if graph.is_directed():
        return 1.0 / (1 + _num_others(graph.successors(source), source))
    return 1.0 / (1 + max(_num_others(graph.neighbors(end), end) for end in (source, target)))


def _num_others(neighbours: Iterable[int], rank: int) -> int:
    return sum(other != rank for other in neighbours)


def _check(graph: nx.Graph) -> None:
    size = graph.number_of_nodes()
    if size == 0 or set(graph) != set(range(size)):
        raise ConfigError(f"the nodes of a graph of {size} must be the ranks 0 to {size - 1}")
    connected = nx.is_strongly_connected if graph.is_directed() else nx.is_connected
    if not connected(graph):
        raise ConfigError("the graph is not connected: some ranks would never hear of some others")

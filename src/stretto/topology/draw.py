"""Drawings of a topology: a networkx graph of one round, or a line of text for each."""

import networkx as nx

from stretto.topology.mixing import Mixing, Topology

_DRAWN_ROUNDS = 4
"""How many rounds show what random peers are like."""


def graph(mixing: Mixing, size: int, step: int = 0, segment: int = 0) -> nx.DiGraph:
    """Return one round as a graph: an edge, with its ``weight``, for every message."""
    drawn = nx.DiGraph()
    drawn.add_nodes_from(range(size))
    for rank in range(size):
        for edge in mixing(rank, size, step, segment).sends:
            drawn.add_edge(rank, edge.rank, weight=edge.weight)
    return drawn


def lines(topology: Topology, size: int, rounds: int | None = None, segment: int = 0) -> list[str]:
    """Return a line for each round, one period of them: ``0>1`` is a message, ``0-1`` two.

    Where peers are drawn there is no period, and four rounds are shown.
    """
    if rounds is None:
        rounds = topology.period(size) or _DRAWN_ROUNDS
    return [_line(graph(topology, size, step, segment)) for step in range(rounds)]


def _line(drawn: nx.DiGraph) -> str:
    mutual = [(a, b) for a, b in drawn.edges if a < b and drawn.has_edge(b, a)]
    single = [(a, b) for a, b in drawn.edges if not drawn.has_edge(b, a)]
    marks = {**dict.fromkeys(mutual, "-"), **dict.fromkeys(single, ">")}
    return " ".join(f"{a}{mark}{b}" for (a, b), mark in sorted(marks.items())) or "nobody talks"

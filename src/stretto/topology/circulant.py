"""Topologies in which every rank does the same, seen from where it stands: complete and ring."""

from collections.abc import Collection

from stretto.topology.mixing import Edge, Peers, Topology


def complete() -> Topology:
    """Return the topology in which everybody hears everybody: the exact mean in one round.

    n-1 messages of a rank: what the others are measured against, not a way to run.
    """
    return Topology("complete", _complete)


def ring() -> Topology:
    """Return the ring: each rank hears the two beside it, with weights of a third.

    Its gap shrinks with the square of n: for teaching, or up to about 8 ranks.
    Lian et al., 2017, arXiv:1705.09056.
    """
    return Topology("ring", _ring)


def circulant(
    rank: int, size: int, distances: Collection[int], weight: float | None = None
) -> Peers:
    """Return the round in which every rank tells those who are ``distances`` ahead of it.

    Distances differ from each other and from 0 modulo ``size``. Without a ``weight`` all that a
    rank hears weighs the same, its own value included. Doubly stochastic, for each rank gives
    away what it is given.
    """
    if weight is None:
        weight = 1.0 / (len(distances) + 1)
    return Peers(
        1.0 - weight * len(distances),
        tuple(Edge((rank + distance) % size, weight) for distance in distances),
        tuple(Edge((rank - distance) % size, weight) for distance in distances),
    )


def _complete(rank: int, size: int, step: int, segment: int) -> Peers:
    return circulant(rank, size, range(1, size))


def _ring(rank: int, size: int, step: int, segment: int) -> Peers:
    # Two ranks have one neighbour, on both sides; one rank has none.
    return circulant(rank, size, sorted({1 % size, (size - 1) % size} - {0}))

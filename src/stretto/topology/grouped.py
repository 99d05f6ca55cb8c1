"""Groups: the exact mean inside a group of ranks in a row, gossip between groups.

As one round of single ranks this is W x J, the groups' matrix times the mean inside: a rank
hears every member of the groups that its own hears. Nobody has to run it so. Whoever carries it
out makes the mean inside by a collective and lets groups talk by the topology between them.
"""

from functools import partial

from stretto.errors import ConfigError
from stretto.topology.mixing import Edge, Peers, Topology


def grouped(between: Topology, groups: int) -> Topology:
    """Return ``between`` over ``groups`` groups of equal size, lifted to their ranks.

    One group is `complete`; as many groups as ranks are ``between`` itself. What limits
    disagreement, and slows consensus, is the number of groups, not of ranks.
    """
    if groups < 1:
        raise ConfigError(f"groups must be at least 1, got {groups}")
    return Topology(
        f"{between.name} between {groups} groups",
        partial(_lifted, between, groups),
        lambda _size: between.period(groups),
        partial(_refuses, between, groups),
        between.doubly_stochastic,
    )


def members(group: int, width: int) -> range:
    """Return the ranks of a group, where each has ``width``."""
    return range(group * width, (group + 1) * width)


def _lifted(between: Topology, groups: int, rank: int, size: int, step: int, segment: int) -> Peers:
    width = size // groups
    mine = rank // width
    peers = between.mixing(mine, groups, step, segment)
    own = peers.own / width
    inside = [Edge(other, own) for other in members(mine, width) if other != rank]
    return Peers(
        own,
        (*inside, *_spread(peers.sends, width)),
        (*inside, *_spread(peers.receives, width)),
    )


def _spread(edges: tuple[Edge, ...], width: int) -> list[Edge]:
    """Return an edge to every member of a group for the edge to that group."""
    return [
        Edge(member, edge.weight / width) for edge in edges for member in members(edge.rank, width)
    ]


def possible_groups(size: int) -> str:
    """Return, in words, how many groups of equal size so many ranks can be."""
    possible = [str(n) for n in range(1, size + 1) if size % n == 0]
    last = f" or {possible.pop()}" if len(possible) > 1 else ""
    return f"{', '.join(possible)}{last}"


def _refuses(between: Topology, groups: int, size: int) -> str | None:
    if size % groups:
        return f"{size} ranks can be {possible_groups(size)} groups of equal size, not {groups}"
    return between.refuses(groups)

"""Visits as messages on a cluster: two ranks tell each other their models, one visit at a time."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from stretto.cluster.world import Mesh
from stretto.sim.cluster import Cluster
from stretto.sim.steps.pace import Carriage, Flow
from stretto.sim.steps.rhythm import Exchange
from stretto.sim.steps.talks import message

Whom = Callable[[int, int, int], int | None]
"""From a rank, the number of ranks and a step to whom that rank visits after it."""
FOLLOWED = 32
"""Ranks that are laid out, at most; whole hosts. Each rank visits one of many, whoever they are: it
takes no longer where there are more of them."""
_PERIODS = 48
"""Rounds that are followed: visits are drawn, and some wait behind others."""


def part_of(cluster: Cluster) -> Cluster:
    """Return as many of the cluster's hosts as stand for all of them."""
    mesh = cluster.mesh
    if mesh.size <= FOLLOWED:
        return cluster
    hosts = max(2, FOLLOWED // max(mesh.ranks_per_host))
    return cluster.with_mesh(Mesh(mesh.ranks_per_host[:hosts]))


def visits(cluster: Cluster, whom: Whom, most_ahead: int) -> Carriage:
    """Lay out all ranks, each with the visits that it makes."""
    size = cluster.mesh.size

    @cache
    def there_and_back(num_bytes: float, rank: int, peer: int) -> Flow:
        there, back = (message(cluster, num_bytes, *way) for way in ((rank, peer), (peer, rank)))
        # Both at once, when a word has come there; a last word says that all is done.
        uses = defaultdict[str, float](float)
        for name, share in (*there.uses.items(), *back.uses.items()):
            uses[name] += share
        return replace(there, delay_s=3 * there.delay_s, uses=uses, visit=True)

    def flows(period: int, exchange: Exchange) -> Sequence[Flow]:
        peers = ((rank, whom(rank, size, period)) for rank in range(size))
        return [
            there_and_back(exchange.num_bytes, rank, peer)
            for rank, peer in peers
            if peer is not None
        ]

    return Carriage(size, flows, _PERIODS, cluster.mesh.hosts, most_ahead)

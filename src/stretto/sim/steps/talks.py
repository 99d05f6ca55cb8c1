"""Exchanges with peers as messages on a cluster: of every rank, or of one that stands for all."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from stretto.sim.charge import CORES, LINK, THREAD
from stretto.sim.cluster import Cluster
from stretto.sim.steps.pace import Carriage, Flow
from stretto.sim.steps.rhythm import Exchange, Rhythm
from stretto.topology import Topology

_DRAWN = 16
"""Rounds that are followed where peers are drawn."""
_DRAWS = 32
"""Rounds and segments of drawn peers that are looked at for what is usual."""
_LOOKED_AT = 64
"""Ranks that are asked for their peers, at least; whole hosts."""
OUT = f"{LINK} out"
"""What the names of links begin with, as their hosts send."""


@dataclass(frozen=True, slots=True)
class Talk:
    """Who tells whom."""

    told: Callable[[int, int, Exchange], Sequence[int]]
    """From a rank, the number of a period and an exchange to those whom it tells."""
    period: int | None
    """After which they are the same again; None where they are drawn."""


def of_topology(topology: Topology, size: int) -> Talk:
    """Return the talk of ``size`` ranks that have one model each.

    Raises:
        ConfigError: So many ranks cannot have that topology.
    """
    topology.check(size)

    def told(rank: int, period: int, exchange: Exchange) -> Sequence[int]:
        return [edge.rank for edge in topology(rank, size, period, exchange.number).sends]

    return Talk(told, topology.period(size))


def of_groups(between: Topology, groups: int, size: int) -> Talk:
    """Return the talk of groups in a row, each of which has one model.

    A rank tells who is at its place in each group that its own tells; what goes round a group it
    tells the next member.

    Raises:
        ConfigError: So many groups cannot have that topology.
    """
    among_groups, width = of_topology(between, groups), size // groups

    def told(rank: int, period: int, exchange: Exchange) -> Sequence[int]:
        group, place = divmod(rank, width)
        if exchange.inside:
            return [group * width + (place + 1) % width]
        return [width * other + place for other in among_groups.told(group, period, exchange)]

    return Talk(told, among_groups.period)


@dataclass(frozen=True, slots=True)
class Told:
    """How many messages a rank sends in a round, in the mean."""

    between: float
    """To other hosts."""
    inside: float
    """To its own."""
    uneven: float = 1.0
    """How many times the mean the host sends to others that sends most."""


@dataclass(frozen=True, slots=True)
class Toll:
    """What one message takes, alone: seconds, and the resources of both its ends."""

    work_s: float
    delay_s: float
    link: float
    """Share of the link's rate that it then takes; none inside a host."""
    core: float
    """Share of a core that either end then takes."""


def toll(cluster: Cluster, num_bytes: float, *, between: bool, messages: float = 1.0) -> Toll:
    """Return what ``messages`` of ``num_bytes`` together take."""
    cpu, way = cluster.cpu, cluster.between if between else cluster.inside
    wire_s = num_bytes / way.bytes_per_s
    per_byte = cpu.s_per_byte_between if between else cpu.s_per_byte_inside
    half_s = (num_bytes * per_byte + messages * cpu.s_per_message) / 2
    work_s = max(wire_s, half_s)
    busy = work_s or 1.0
    return Toll(work_s, way.latency_s, wire_s / busy if between else 0.0, half_s / busy)


def every_rank(talk: Talk, cluster: Cluster) -> Carriage:
    """Lay out all ranks, each with its own peers in every round."""
    size = cluster.mesh.size

    @cache
    def way(num_bytes: float, hops: int, source: int, target: int) -> Flow:
        found = message(cluster, num_bytes, source, target)
        return replace(found, delay_s=hops * found.delay_s)

    def flows(period: int, exchange: Exchange) -> Sequence[Flow]:
        return [
            way(exchange.num_bytes, exchange.hops, rank, peer)
            for rank in range(size)
            for peer in talk.told(rank, period, exchange)
        ]

    return Carriage(size, flows, talk.period or _DRAWN, cluster.mesh.hosts)


def message(cluster: Cluster, num_bytes: float, source: int, target: int) -> Flow:
    """Return one message from rank to rank."""
    ends = (cluster.mesh.host_of(source), cluster.mesh.host_of(target))
    taken = toll(cluster, num_bytes, between=ends[0] != ends[1])
    uses = {f"{THREAD} {source}": taken.core, f"{THREAD} {target}": taken.core}
    if taken.link:
        uses |= {f"{OUT} {ends[0]}": taken.link, f"{LINK} into {ends[1]}": taken.link}
    for host in ends:
        pool = f"{CORES} {0 if cluster.cpu.pool == 'shared' else host}"
        uses[pool] = uses.get(pool, 0.0) + taken.core / cluster.cpu.cores
    return Flow(source, target, taken.work_s, taken.delay_s, uses)


def stand_in(rhythm: Rhythm, talk: Talk, cluster: Cluster) -> Carriage:
    """Lay out one rank that stands for all: what it sends comes to it, as from somebody like it.

    It sends what ranks send in the mean; its host's link and cores carry that of all its ranks, and
    as much more as the host has that talks most: the others wait for it, sooner or later.
    """
    on_host = max(cluster.ranks_per_host)
    sharing = cluster.mesh.size if cluster.cpu.pool == "shared" else on_host
    usual = {
        inside: usual_talk([e for e in rhythm.exchanges if e.inside == inside], talk, cluster)
        for inside in {e.inside for e in rhythm.exchanges}
    }

    def flow(exchange: Exchange, messages: float, told: Told, *, between: bool) -> Flow:
        num_bytes = messages * exchange.num_bytes
        taken = toll(cluster, num_bytes, between=between, messages=messages)
        uses = {THREAD: 2 * taken.core, CORES: 2 * taken.core * sharing / cluster.cpu.cores}
        if taken.link:
            out = taken.link * on_host
            uses |= {OUT: out, f"{LINK} into": out * told.uneven}
        return Flow(0, 0, taken.work_s, exchange.hops * taken.delay_s, uses)

    def flows(period: int, exchange: Exchange) -> Sequence[Flow]:
        told = usual[exchange.inside](period)
        ways = ((told.between, True), (told.inside, False))
        return [flow(exchange, n, told, between=between) for n, between in ways if n]

    return Carriage(1, flows, talk.period or 1)


def usual_talk(
    exchanges: Sequence[Exchange], talk: Talk, cluster: Cluster
) -> Callable[[int], Told]:
    """Return how much ranks say of some exchanges in the round of a number.

    Where peers are drawn, no round is like another: what is usual counts for all.
    """
    mesh, size = cluster.mesh, cluster.mesh.size
    apart = max(1, size // _LOOKED_AT // max(mesh.ranks_per_host))
    hosts = range(0, mesh.hosts, apart)
    # What is the same for all exchanges need be looked at in one of them.
    looked_at = exchanges[:_DRAWS] if talk.period is None else exchanges[:1]

    @cache
    def told(number: int) -> Told:
        out, inside = dict.fromkeys(hosts, 0.0), 0.0
        for exchange in looked_at:
            for host in hosts:
                home = mesh.on_host(host)
                for rank in home:
                    peers = talk.told(rank, number, exchange)
                    near = sum(peer in home for peer in peers)
                    out[host] += (len(peers) - near) * exchange.num_bytes
                    inside += near * exchange.num_bytes
        ranks = sum(len(mesh.on_host(host)) for host in hosts)
        whole = sum(exchange.num_bytes for exchange in looked_at) or 1.0
        mean = sum(out.values()) / ranks / whole
        most = max(out.values()) / max(mesh.ranks_per_host) / whole
        return Told(mean, inside / ranks / whole, most / mean if mean else 1.0)

    period = talk.period
    if period is not None:
        return lambda number: told(number % period)
    drawn = [told(number) for number in range(max(1, _DRAWS // len(looked_at)))]
    columns = zip(*((one.between, one.inside, one.uneven) for one in drawn), strict=True)
    usual = Told(*(statistics.fmean(column) for column in columns))
    return lambda _number: usual

"""The messages of gossip and pairwise averaging on a cluster, for step simulations.

Either every rank is simulated, or one representative rank with the mean load of all.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from stretto.cluster.world import Mesh
from stretto.simulator.cluster import Cluster
from stretto.simulator.message_costs import CORES, LINK, THREAD
from stretto.simulator.step_timeline import Exchange, MessageFlow, StepTimeline, TrafficModel
from stretto.topology import Topology

_RANDOM_ROUNDS = 16
"""Simulated rounds where peers are random."""
_SAMPLED_ROUNDS = 32
"""Rounds times segments that are sampled for the mean load where peers are random."""
_MIN_SAMPLED_RANKS = 64
"""Smallest number of ranks that are sampled for the mean load; whole hosts."""
LINK_OUT = f"{LINK} out"
"""The prefix of the names of links in the direction out of a host."""


@dataclass(frozen=True, slots=True)
class ExchangePattern:
    """The receivers of every rank's messages, by period and exchange."""

    receivers: Callable[[int, int, Exchange], Sequence[int]]
    """From a rank, the number of a period and an exchange to the ranks that it sends to."""
    period: int | None
    """Periods after which the receivers repeat; None where they are random."""


def pattern_of_topology(topology: Topology, size: int) -> ExchangePattern:
    """Return the exchanges of ``size`` ranks, each with its own replica.

    Raises:
        ConfigError: ``topology`` does not support this number of ranks.
    """
    topology.check(size)

    def receivers(rank: int, period: int, exchange: Exchange) -> Sequence[int]:
        return [edge.rank for edge in topology(rank, size, period, exchange.number).sends]

    return ExchangePattern(receivers, topology.period(size))


def pattern_of_groups(between: Topology, groups: int, size: int) -> ExchangePattern:
    """Return the exchanges of groups of consecutive ranks, each group with one replica.

    A rank sends to the rank with its index in each group that its own group sends to. Exchanges
    inside a group go to the next member.

    Raises:
        ConfigError: ``between`` does not support this number of groups.
    """
    among_groups, width = pattern_of_topology(between, groups), size // groups

    def receivers(rank: int, period: int, exchange: Exchange) -> Sequence[int]:
        group, index = divmod(rank, width)
        if exchange.inside:
            return [group * width + (index + 1) % width]
        return [width * other + index for other in among_groups.receivers(group, period, exchange)]

    return ExchangePattern(receivers, among_groups.period)


@dataclass(frozen=True, slots=True)
class MessageLoad:
    """The mean number of messages that a rank sends in a round."""

    between: float
    """Messages to other hosts."""
    inside: float
    """Messages to its own host."""
    imbalance: float = 1.0
    """The messages between hosts of the busiest host, divided by the mean over hosts."""


@dataclass(frozen=True, slots=True)
class MessageCost:
    """The isolated cost of one message: seconds, and the load on resources at both ends."""

    work_s: float
    delay_s: float
    link: float
    """Share of the link's rate that it takes while it works; 0 inside a host."""
    core: float
    """Share of a core that each end takes while it works."""


def message_cost(
    cluster: Cluster, num_bytes: float, *, between: bool, messages: float = 1.0
) -> MessageCost:
    """Return the cost of ``messages`` messages of ``num_bytes`` in all."""
    cpu, link = cluster.cpu, cluster.between if between else cluster.inside
    wire_s = num_bytes / link.bytes_per_s
    per_byte = cpu.s_per_byte_between if between else cpu.s_per_byte_inside
    half_s = (num_bytes * per_byte + messages * cpu.s_per_message) / 2
    work_s = max(wire_s, half_s)
    busy = work_s or 1.0
    return MessageCost(work_s, link.latency_s, wire_s / busy if between else 0.0, half_s / busy)


def traffic_of_every_rank(pattern: ExchangePattern, cluster: Cluster) -> TrafficModel:
    """Return the traffic of all ranks, each with its own peers in every round."""
    size = cluster.mesh.size

    @cache
    def flow_between(num_bytes: float, hops: int, source: int, target: int) -> MessageFlow:
        found = message_flow(cluster, num_bytes, source, target)
        return replace(found, delay_s=hops * found.delay_s)

    def flows(period: int, exchange: Exchange) -> Sequence[MessageFlow]:
        return [
            flow_between(exchange.num_bytes, exchange.hops, rank, peer)
            for rank in range(size)
            for peer in pattern.receivers(rank, period, exchange)
        ]

    return TrafficModel(size, flows, pattern.period or _RANDOM_ROUNDS, cluster.mesh.hosts)


def message_flow(cluster: Cluster, num_bytes: float, source: int, target: int) -> MessageFlow:
    """Return one message from rank ``source`` to rank ``target``."""
    ends = (cluster.mesh.host_of(source), cluster.mesh.host_of(target))
    cost = message_cost(cluster, num_bytes, between=ends[0] != ends[1])
    uses = {f"{THREAD} {source}": cost.core, f"{THREAD} {target}": cost.core}
    if cost.link:
        uses |= {f"{LINK_OUT} {ends[0]}": cost.link, f"{LINK} into {ends[1]}": cost.link}
    for host in ends:
        pool = f"{CORES} {0 if cluster.cpu.pool == 'shared' else host}"
        uses[pool] = uses.get(pool, 0.0) + cost.core / cluster.cpu.cores
    return MessageFlow(source, target, cost.work_s, cost.delay_s, uses)


def traffic_of_representative(
    step_timeline: StepTimeline, pattern: ExchangePattern, cluster: Cluster
) -> TrafficModel:
    """Return the traffic of one rank that represents all: it sends its messages to itself.

    It sends the mean load of the ranks. Its host's link and cores carry the messages of all ranks
    of the host. The load on the link is that of the busiest host, because the others wait for it.
    """
    ranks_on_host = max(cluster.ranks_per_host)
    sharing = cluster.mesh.size if cluster.cpu.pool == "shared" else ranks_on_host
    mean_load = {
        inside: mean_message_load(
            [e for e in step_timeline.exchanges if e.inside == inside], pattern, cluster
        )
        for inside in {e.inside for e in step_timeline.exchanges}
    }

    def flow(
        exchange: Exchange, messages: float, load: MessageLoad, *, between: bool
    ) -> MessageFlow:
        num_bytes = messages * exchange.num_bytes
        cost = message_cost(cluster, num_bytes, between=between, messages=messages)
        uses = {THREAD: 2 * cost.core, CORES: 2 * cost.core * sharing / cluster.cpu.cores}
        if cost.link:
            out = cost.link * ranks_on_host
            uses |= {LINK_OUT: out, f"{LINK} into": out * load.imbalance}
        return MessageFlow(0, 0, cost.work_s, exchange.hops * cost.delay_s, uses)

    def flows(period: int, exchange: Exchange) -> Sequence[MessageFlow]:
        load = mean_load[exchange.inside](period)
        parts = ((load.between, True), (load.inside, False))
        return [flow(exchange, n, load, between=between) for n, between in parts if n]

    return TrafficModel(1, flows, pattern.period or 1)


def mean_message_load(
    exchanges: Sequence[Exchange], pattern: ExchangePattern, cluster: Cluster
) -> Callable[[int], MessageLoad]:
    """Return a function from the number of a round to the mean load of ``exchanges`` in it.

    Where peers are random, every round has the mean load of several sampled rounds.
    """
    mesh, size = cluster.mesh, cluster.mesh.size
    host_stride = max(1, size // _MIN_SAMPLED_RANKS // max(mesh.ranks_per_host))
    hosts = range(0, mesh.hosts, host_stride)
    # Without random peers, all exchanges have the same receivers: one of them is enough.
    sampled_exchanges = exchanges[:_SAMPLED_ROUNDS] if pattern.period is None else exchanges[:1]

    @cache
    def round_load(number: int) -> MessageLoad:
        out, inside = dict.fromkeys(hosts, 0.0), 0.0
        for exchange in sampled_exchanges:
            for host in hosts:
                local_ranks = mesh.ranks_on_host(host)
                for rank in local_ranks:
                    peers = pattern.receivers(rank, number, exchange)
                    on_same_host = sum(peer in local_ranks for peer in peers)
                    out[host] += (len(peers) - on_same_host) * exchange.num_bytes
                    inside += on_same_host * exchange.num_bytes
        ranks = sum(len(mesh.ranks_on_host(host)) for host in hosts)
        total = sum(exchange.num_bytes for exchange in sampled_exchanges) or 1.0
        mean = sum(out.values()) / ranks / total
        most = max(out.values()) / max(mesh.ranks_per_host) / total
        return MessageLoad(mean, inside / ranks / total, most / mean if mean else 1.0)

    period = pattern.period
    if period is not None:
        return lambda number: round_load(number % period)
    loads = [
        round_load(number) for number in range(max(1, _SAMPLED_ROUNDS // len(sampled_exchanges)))
    ]
    columns = zip(*((one.between, one.inside, one.imbalance) for one in loads), strict=True)
    mean_load = MessageLoad(*(statistics.fmean(column) for column in columns))
    return lambda _number: mean_load


# --- pairwise averaging: an active rank and a passive peer exchange their models ---

ChoosePeer = Callable[[int, int, int], int | None]
"""From a rank, the number of ranks and a step to the rank's passive peer after that step."""
MAX_SIMULATED_RANKS = 32
"""Largest number of simulated ranks; whole hosts. Each rank averages with one peer at a time, so
more ranks do not change the time."""
_SIMULATED_ROUNDS = 48
"""Simulated rounds: peers are random, and some exchanges wait behind others."""


def representative_cluster(cluster: Cluster) -> Cluster:
    """Return a part of the cluster's hosts that represents all of them."""
    mesh = cluster.mesh
    if mesh.size <= MAX_SIMULATED_RANKS:
        return cluster
    hosts = max(2, MAX_SIMULATED_RANKS // max(mesh.ranks_per_host))
    return cluster.with_mesh(Mesh(mesh.ranks_per_host[:hosts]))


def traffic_of_pairwise_averaging(
    cluster: Cluster, choose_peer: ChoosePeer, max_ahead: int
) -> TrafficModel:
    """Return the traffic of all ranks, each with the exchanges that it starts."""
    size = cluster.mesh.size

    @cache
    def round_trip(num_bytes: float, rank: int, peer: int) -> MessageFlow:
        there, back = (
            message_flow(cluster, num_bytes, *ends) for ends in ((rank, peer), (peer, rank))
        )
        # A request, then both models at once, then an acknowledgement: three latencies.
        uses = defaultdict[str, float](float)
        for name, share in (*there.uses.items(), *back.uses.items()):
            uses[name] += share
        return replace(there, delay_s=3 * there.delay_s, uses=uses, is_one_sided=True)

    def flows(period: int, exchange: Exchange) -> Sequence[MessageFlow]:
        peers = ((rank, choose_peer(rank, size, period)) for rank in range(size))
        return [
            round_trip(exchange.num_bytes, rank, peer) for rank, peer in peers if peer is not None
        ]

    return TrafficModel(size, flows, _SIMULATED_ROUNDS, cluster.mesh.hosts, max_ahead)

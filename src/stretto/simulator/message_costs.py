"""The cost of every message of a schedule on a cluster: latency, bytes on links, work of cores.

The costs are tasks for the event engine.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.collectives.schedule import chunk_bounds
from stretto.simulator.cluster import Cluster
from stretto.simulator.expanded_schedule import (
    ExpandedMessages,
    ExpandedRounds,
    ExpandedSchedule,
    Symmetry,
)
from stretto.simulator.tasks import Floats, Ints, LinkQueue, Tasks, sum_by_index

ELEMENT_BYTES = 4
"""Elements are assumed to be sent as 32-bit floats."""
LATENCY, LINK, INSIDE, CORES, THREAD = (
    "latency",
    "link between hosts",
    "transport inside a host",
    "cores",
    "I/O thread of a rank",
)
"""The kinds of bottlenecks of a collective."""


@dataclass(frozen=True, slots=True)
class ResourceLayout:
    """The order of the resources: links out, links in, pools of cores, one thread per rank."""

    hosts: int
    pools: int
    ranks: int

    @property
    def slices_by_kind(self) -> dict[str, slice]:
        """Return the range of resources of each kind."""
        links, pools = 2 * self.hosts, 2 * self.hosts + self.pools
        return {
            LINK: slice(0, links),
            CORES: slice(links, pools),
            THREAD: slice(pools, pools + self.ranks),
        }

    @property
    def count(self) -> int:
        """Return the number of resources."""
        return 2 * self.hosts + self.pools + self.ranks


@dataclass(frozen=True, slots=True)
class ResourceCosts:
    """The tasks of a schedule: the messages that are not empty, then the end of every round.

    Where senders buffer the ends of messages, the beginnings of messages are further tasks, after
    all others.
    """

    num_bytes: Floats
    """The size of each message."""
    source: Ints
    target: Ints
    """The sender and receiver of each message, as indices of expanded ranks."""
    between: NDArray[np.bool_]
    """Whether each message goes from one host to another."""
    tasks: Tasks
    layout: ResourceLayout
    has_buffered_sends: bool
    """Whether senders continue before their messages have arrived."""

    @property
    def num_messages(self) -> int:
        """Return the number of non-empty messages; the tasks after them are ends of rounds."""
        return len(self.num_bytes)

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds; the tasks after them are beginnings of messages."""
        others = len(self.tasks) - self.num_messages
        return others - self.num_messages if self.has_buffered_sends else others

    def message_of(self, task: Ints) -> Ints:
        """Return the message that each task is the end or beginning of; -1 for ends of rounds."""
        num, begins = self.num_messages, self.num_messages + self.num_rounds
        found: Ints = np.where(task < num, task, np.where(task < begins, -1, task - begins))
        return found


def cost_resources(expanded: ExpandedSchedule, num_bytes: int, cluster: Cluster) -> ResourceCosts:
    """Return the tasks of ``expanded`` for a tensor of ``num_bytes`` on ``cluster``."""
    size = message_bytes(expanded, num_bytes)
    kept = size > 0
    size, messages = size[kept], _select(expanded.messages, kept)
    hosts = _HostIndex(cluster)
    symmetry = expanded.symmetry
    ranks, source = symmetry.ranks, expanded.rounds.rank[messages.source]
    target = symmetry.target(ranks[source], messages.offset)
    between = hosts.host_of(ranks[source]) != hosts.host_of(target)
    target = symmetry.representative(target)
    shared = cluster.cpu.pool == "shared"
    num_hosts = int(hosts.host_of(ranks[-1:])[0]) + 1
    layout = ResourceLayout(num_hosts, 1 if shared else num_hosts, symmetry.num_representatives)
    resource_use = _ResourceUse(hosts.host_of(ranks), layout, cluster, symmetry)
    work, resource, load = resource_use.messages(size, between, source, target)
    buffered_fraction = _buffered_fraction(size, between, cluster)
    added = sum_by_index(messages.target, size * messages.added, len(expanded.rounds))
    add_work, add_resource, add_load = resource_use.additions(added, expanded.rounds.rank)
    latency = np.where(between, cluster.between.latency_s, cluster.inside.latency_s)
    waits = [
        dependency_edges(messages, expanded.rounds),
        _stagger_lanes(messages, expanded.rounds, between),
    ]
    earlier, later = (np.concatenate(ends) for ends in zip(*waits, strict=True))
    tasks = Tasks(
        np.concatenate([latency, np.zeros(len(expanded.rounds))]),
        np.concatenate([work, add_work]),
        np.concatenate([resource, add_resource]),
        np.concatenate([load, add_load]),
        earlier,
        later,
        layout.count,
        resource_use.queue(between, target, len(expanded.rounds)),
    )
    if buffered_fraction.any():
        tasks = _split_messages(tasks, buffered_fraction)
    return ResourceCosts(
        size, source, target, between, tasks, layout, bool(buffered_fraction.any())
    )


def _stagger_lanes(
    messages: ExpandedMessages, rounds: ExpandedRounds, between: NDArray[np.bool_]
) -> tuple[Ints, Ints]:
    """Return extra dependencies: the lanes of a rank send their first messages in turn.

    This holds for messages to other hosts, and models threads that wake one after another. Lanes
    that start together and share every link fairly would stay in step. They would never use both
    directions of the link at once, while real lanes drift apart.
    """
    sent = np.flatnonzero(between)
    sent = sent[np.lexsort((sent, messages.source[sent]))]  # in program order, rank by rank
    rank, lane = rounds.rank[messages.source[sent]], rounds.lane[messages.source[sent]]
    _, first = np.unique(rank * (lane.max(initial=0) + 1) + lane, return_index=True)
    first = np.sort(first)
    follows = np.flatnonzero(rank[first][1:] == rank[first][:-1])
    return sent[first[follows]], sent[first[follows + 1]]


def _buffered_fraction(size: Floats, between: NDArray[np.bool_], cluster: Cluster) -> Floats:
    """Return the share of each message, at its end, that the sender only has to buffer."""
    buffered = np.where(between, cluster.between.buffered_bytes, cluster.inside.buffered_bytes)
    return np.minimum(buffered / size, 1.0)


def _split_messages(tasks: Tasks, buffered_fraction: Floats) -> Tasks:
    """Return ``tasks`` with every message split into its beginning and its buffered end.

    The beginnings are new tasks after all others. A beginning has the predecessors of the message.
    The sender's round waits for the beginning only.
    """
    num, begins = len(buffered_fraction), len(tasks)
    begin = begins + np.arange(num)
    earlier, later = tasks.earlier.copy(), tasks.later.copy()
    waits, ends = later < num, earlier < num
    later[waits] += begins
    # `dependency_edges` lists the edges from messages to their senders' rounds first.
    sent = np.flatnonzero(ends)[:num]
    earlier[sent] += begins
    delay, work = tasks.delay_s.copy(), tasks.work_s.copy()
    delay[:num] = 0.0
    work[:num] *= buffered_fraction
    return Tasks(
        np.concatenate([delay, tasks.delay_s[:num]]),
        np.concatenate([work, tasks.work_s[:num] * (1 - buffered_fraction)]),
        np.concatenate([tasks.resource, tasks.resource[:num]]),
        np.concatenate([tasks.load, tasks.load[:num]]),
        np.concatenate([earlier, begin]),
        np.concatenate([later, np.arange(num)]),
        tasks.num_resources,
        _split_queue(tasks.queue, num),
    )


def _split_queue(queue: LinkQueue | None, num: int) -> LinkQueue | None:
    """Return ``queue`` for split messages: only beginnings wait for the ready message."""
    if queue is None:
        return None
    queue_resource = np.concatenate([queue.queue_resource, queue.queue_resource[:num]])
    queue_resource[:num] = -1
    return LinkQueue(queue_resource, np.concatenate([queue.max_queued_s, queue.max_queued_s[:num]]))


def message_bytes(expanded: ExpandedSchedule, num_bytes: int) -> Floats:
    """Return the size of every message in bytes.

    All chunks are assumed to be equal. The exception is a tensor with fewer elements than chunks,
    if every rank is expanded: then each chunk has one element or none, as in reality.
    """
    chunks, messages = expanded.schedule.num_chunks, expanded.messages
    numel = -(-num_bytes // ELEMENT_BYTES)
    if numel >= chunks or expanded.symmetry.ranks_represented > 1:
        count = messages.stop - messages.start
        return count.astype(np.float64) * (num_bytes / chunks)
    bounds = np.array(chunk_bounds(numel, chunks), dtype=np.int64)
    count = bounds[messages.stop] - bounds[messages.start]
    return count.astype(np.float64) * (num_bytes / max(numel, 1))


class _HostIndex:
    """Looks up the hosts of whole columns of ranks."""

    def __init__(self, cluster: Cluster) -> None:
        self._ends = np.cumsum(np.array(cluster.ranks_per_host))

    def host_of(self, rank: Ints) -> Ints:
        return np.searchsorted(self._ends, rank, side="right").astype(np.int64)


@dataclass(frozen=True, slots=True)
class _ResourceUse:
    """The resources that messages and additions use, with their loads.

    Loads include the ranks that are not expanded, which do the same at the same time. A host's link
    and cores count the ranks of the host; a pool shared by all hosts counts all ranks.
    """

    host: Ints
    """The host of each expanded rank."""
    layout: ResourceLayout
    cluster: Cluster
    symmetry: Symmetry

    @property
    def _cores(self) -> float:
        cpu = self.cluster.cpu
        return cpu.cores / (
            self.symmetry.ranks_represented
            if cpu.pool == "shared"
            else self._ranks_represented_on_host
        )

    @property
    def _ranks_represented_on_host(self) -> int:
        return self.symmetry.ranks_represented_on_host(self.cluster.ranks_per_host[0])

    def _pool(self, rank: Ints) -> Ints:
        pool_index = self.host[rank] if self.layout.pools > 1 else np.zeros_like(rank)
        return 2 * self.layout.hosts + pool_index

    def messages(
        self, size: Floats, between: NDArray[np.bool_], source: Ints, target: Ints
    ) -> tuple[Floats, Ints, Floats]:
        """Return the isolated seconds of each message, its resources, and the load on each."""
        cpu, links, layout = self.cluster.cpu, self.cluster.between, self.layout
        wire = size / np.where(between, links.bytes_per_s, self.cluster.inside.bytes_per_s)
        per_byte = np.where(between, cpu.s_per_byte_between, cpu.s_per_byte_inside)
        half = (size * per_byte + cpu.s_per_message) / 2
        work = np.maximum(wire, half)
        link, core = np.where(between, wire, 0.0) / work, half / work
        threads = 2 * layout.hosts + layout.pools
        resource = [
            self.host[source],
            layout.hosts + self.host[target],
            self._pool(source),
            self._pool(target),
            threads + source,
            threads + target,
        ]
        link = link * self._ranks_represented_on_host
        load = [link, link, core / self._cores, core / self._cores, core, core]
        return work, np.stack(resource, axis=1), np.stack(load, axis=1)

    def queue(self, between: NDArray[np.bool_], target: Ints, num_rounds: int) -> LinkQueue | None:
        """Return the queues for ready messages: the links out of the receivers' hosts."""
        links = self.cluster.between
        max_queued_s = links.queued_bytes / links.bytes_per_s * self._ranks_represented_on_host
        if not max_queued_s or not between.any():
            return None
        queue_resource = np.where(between, self.host[target], -1)
        rounds = np.full(num_rounds, -1)
        return LinkQueue(
            np.concatenate([queue_resource, rounds]),
            np.concatenate([np.where(between, max_queued_s, 0.0), np.zeros(num_rounds)]),
        )

    def additions(self, added: Floats, rank: Ints) -> tuple[Floats, Ints, Floats]:
        """Return the same for the additions of each round, which run on one core."""
        resource = np.zeros((len(rank), 6), dtype=np.int64)
        load = np.zeros((len(rank), 6))
        resource[:, 0] = self._pool(rank)
        work = added * self.cluster.cpu.s_per_byte_added
        load[work > 0, 0] = 1 / self._cores
        return work, resource, load


def _select(messages: ExpandedMessages, kept: NDArray[np.bool_]) -> ExpandedMessages:
    if kept.all():
        return messages
    return ExpandedMessages(
        messages.source[kept],
        messages.target[kept],
        messages.start[kept],
        messages.stop[kept],
        messages.added[kept],
        messages.offset[kept],
    )


def dependency_edges(messages: ExpandedMessages, rounds: ExpandedRounds) -> tuple[Ints, Ints]:
    """Return the dependency edges of tasks: messages are numbered first, then ends of rounds."""
    num = len(messages)
    task = np.arange(num)
    order = np.argsort(rounds.later, kind="stable")
    before, count = rounds.earlier[order], np.bincount(rounds.later, minlength=len(rounds))
    first = np.cumsum(count) - count
    earlier, later = [task, task], [num + messages.source, num + messages.target]
    for end in (messages.source, messages.target):
        each = count[end]
        within = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
        earlier.append(num + before[np.repeat(first[end], each) + within])
        later.append(np.repeat(task, each))
    empty = np.ones(len(rounds), dtype=bool)
    empty[messages.source] = empty[messages.target] = False
    follows_empty = empty[rounds.later]
    earlier.append(num + rounds.earlier[follows_empty])
    later.append(num + rounds.later[follows_empty])
    return np.concatenate(earlier), np.concatenate(later)

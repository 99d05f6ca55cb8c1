"""A schedule's outline laid on a cluster: for one size, what every message and addition takes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.comm.schedule import chunk_bounds
from stretto.sim.alike import Alike
from stretto.sim.cluster import Cluster
from stretto.sim.outline import Messages, Outline, Rounds
from stretto.sim.tasks import Floats, Ints, Queue, Tasks, summed

ELEMENT_BYTES = 4
"""Gradients travel as 32-bit floats unless somebody says otherwise."""
LATENCY, LINK, INSIDE, CORES, THREAD = (
    "latency",
    "link between hosts",
    "transport inside a host",
    "cores",
    "I/O thread of a rank",
)
"""What may hold a collective up."""


@dataclass(frozen=True, slots=True)
class Sites:
    """Where the resources stand: links out, links in, pools of cores, and a thread per rank."""

    hosts: int
    pools: int
    ranks: int

    @property
    def sorts(self) -> dict[str, slice]:
        """Return the resources of each sort."""
        links, pools = 2 * self.hosts, 2 * self.hosts + self.pools
        return {
            LINK: slice(0, links),
            CORES: slice(links, pools),
            THREAD: slice(pools, pools + self.ranks),
        }

    @property
    def count(self) -> int:
        """Return how many there are."""
        return 2 * self.hosts + self.pools + self.ranks


@dataclass(frozen=True, slots=True)
class Charge:
    """What is to be run: the messages that are not empty, then the end of every round.

    Where the ends of messages are handed over, their beginnings are tasks, too, after all others.
    """

    num_bytes: Floats
    """Of each message."""
    source: Ints
    target: Ints
    """Who sends and receives it, by place among the ranks laid out."""
    between: NDArray[np.bool_]
    """Whether it goes from one host to another."""
    tasks: Tasks
    sites: Sites
    handed_over: bool
    """Whether senders go on before their messages have arrived."""

    @property
    def num_messages(self) -> int:
        """Return how many messages are not empty: the tasks after them are ends of rounds."""
        return len(self.num_bytes)

    @property
    def num_rounds(self) -> int:
        """Return how many rounds there are: the tasks after them are beginnings of messages."""
        more = len(self.tasks) - self.num_messages
        return more - self.num_messages if self.handed_over else more

    def message_of(self, task: Ints) -> Ints:
        """Return the message that each task is the end or the beginning of; -1 where of none."""
        num, begins = self.num_messages, self.num_messages + self.num_rounds
        found: Ints = np.where(task < num, task, np.where(task < begins, -1, task - begins))
        return found


def charge(outline: Outline, num_bytes: int, cluster: Cluster) -> Charge:
    """Lay a tensor of ``num_bytes`` on ``outline``."""
    size = message_bytes(outline, num_bytes)
    kept = size > 0
    size, messages = size[kept], _some(outline.messages, kept)
    hosts = _Hosts(cluster)
    alike = outline.alike
    ranks, source = alike.ranks, outline.rounds.rank[messages.source]
    target = alike.target(ranks[source], messages.way)
    between = hosts.of(ranks[source]) != hosts.of(target)
    target = alike.stand_in(target)
    shared = cluster.cpu.pool == "shared"
    num_hosts = int(hosts.of(ranks[-1:])[0]) + 1
    sites = Sites(num_hosts, 1 if shared else num_hosts, alike.num_ranks)
    places = _Places(hosts.of(ranks), sites, cluster, alike)
    work, resource, load = places.messages(size, between, source, target)
    tail = _handed_over(size, between, cluster)
    added = summed(messages.target, size * messages.added, len(outline.rounds))
    add_work, add_resource, add_load = places.additions(added, outline.rounds.rank)
    latency = np.where(between, cluster.between.latency_s, cluster.inside.latency_s)
    waits = [edges(messages, outline.rounds), _one_by_one(messages, outline.rounds, between)]
    earlier, later = (np.concatenate(ends) for ends in zip(*waits, strict=True))
    tasks = Tasks(
        np.concatenate([latency, np.zeros(len(outline.rounds))]),
        np.concatenate([work, add_work]),
        np.concatenate([resource, add_resource]),
        np.concatenate([load, add_load]),
        earlier,
        later,
        sites.count,
        places.queue(between, target, len(outline.rounds)),
    )
    if tail.any():
        tasks = _in_two(tasks, tail)
    return Charge(size, source, target, between, tasks, sites, bool(tail.any()))


def _one_by_one(
    messages: Messages, rounds: Rounds, between: NDArray[np.bool_]
) -> tuple[Ints, Ints]:
    """Return further waits: lanes of a rank send their first messages to other hosts in turn.

    Their threads are woken one after another. Lanes that began together and shared every link
    fairly would stay in step for ever and never use its two directions at once; real ones drift.
    """
    sent = np.flatnonzero(between)
    sent = sent[np.lexsort((sent, messages.source[sent]))]  # in program order, rank by rank
    rank, lane = rounds.rank[messages.source[sent]], rounds.lane[messages.source[sent]]
    _, first = np.unique(rank * (lane.max(initial=0) + 1) + lane, return_index=True)
    first = np.sort(first)
    follows = np.flatnonzero(rank[first][1:] == rank[first][:-1])
    return sent[first[follows]], sent[first[follows + 1]]


def _handed_over(size: Floats, between: NDArray[np.bool_], cluster: Cluster) -> Floats:
    """Return the share of each message, its end, that its sender does not wait for."""
    buffered = np.where(between, cluster.between.buffered_bytes, cluster.inside.buffered_bytes)
    return np.minimum(buffered / size, 1.0)


def _in_two(tasks: Tasks, tail: Floats) -> Tasks:
    """Return ``tasks`` with the beginnings of messages as tasks of their own, after all others.

    A beginning waits for what the message waited for; its sender waits for the beginning alone.
    """
    num, begins = len(tail), len(tasks)
    begin = begins + np.arange(num)
    earlier, later = tasks.earlier.copy(), tasks.later.copy()
    waits, ends = later < num, earlier < num
    later[waits] += begins
    # The first of a message's two ends of rounds is its sender's: so `edges` lays them.
    sent = np.flatnonzero(ends)[:num]
    earlier[sent] += begins
    delay, work = tasks.delay_s.copy(), tasks.work_s.copy()
    delay[:num] = 0.0
    work[:num] *= tail
    return Tasks(
        np.concatenate([delay, tasks.delay_s[:num]]),
        np.concatenate([work, tasks.work_s[:num] * (1 - tail)]),
        np.concatenate([tasks.resource, tasks.resource[:num]]),
        np.concatenate([tasks.load, tasks.load[:num]]),
        np.concatenate([earlier, begin]),
        np.concatenate([later, np.arange(num)]),
        tasks.num_resources,
        _queue_in_two(tasks.queue, num),
    )


def _queue_in_two(queue: Queue | None, num: int) -> Queue | None:
    """Return the same for messages in two: the word comes before the beginning alone."""
    if queue is None:
        return None
    behind = np.concatenate([queue.behind, queue.behind[:num]])
    behind[:num] = -1
    return Queue(behind, np.concatenate([queue.most_s, queue.most_s[:num]]))


def message_bytes(outline: Outline, num_bytes: int) -> Floats:
    """Return the size of every message.

    Chunks are taken to be equal. Where there are fewer elements than chunks, and every rank is
    laid out, they are those of the real thing: one element or none.
    """
    chunks, messages = outline.schedule.num_chunks, outline.messages
    numel = -(-num_bytes // ELEMENT_BYTES)
    if numel >= chunks or outline.alike.copies > 1:
        count = messages.stop - messages.start
        return count.astype(np.float64) * (num_bytes / chunks)
    bounds = np.array(chunk_bounds(numel, chunks), dtype=np.int64)
    count = bounds[messages.stop] - bounds[messages.start]
    return count.astype(np.float64) * (num_bytes / max(numel, 1))


class _Hosts:
    """The host of any rank, for whole columns."""

    def __init__(self, cluster: Cluster) -> None:
        self._ends = np.cumsum(np.array(cluster.ranks_per_host))

    def of(self, rank: Ints) -> Ints:
        return np.searchsorted(self._ends, rank, side="right").astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Places:
    """Who uses which resource how much.

    A host's link and cores also work for the ranks of the host that are not laid out, which do the
    same at the same time, and a pool that all hosts share for those of all hosts.
    """

    host: Ints
    """Of each rank that is laid out."""
    sites: Sites
    cluster: Cluster
    alike: Alike

    @property
    def _cores(self) -> float:
        cpu = self.cluster.cpu
        return cpu.cores / (self.alike.copies if cpu.pool == "shared" else self._on_host)

    @property
    def _on_host(self) -> int:
        return self.alike.on_host(self.cluster.ranks_per_host[0])

    def _pool(self, rank: Ints) -> Ints:
        own = self.host[rank] if self.sites.pools > 1 else np.zeros_like(rank)
        return 2 * self.sites.hosts + own

    def messages(
        self, size: Floats, between: NDArray[np.bool_], source: Ints, target: Ints
    ) -> tuple[Floats, Ints, Floats]:
        """Return seconds alone, resources, and the share of each that it then takes."""
        cpu, links, sites = self.cluster.cpu, self.cluster.between, self.sites
        wire = size / np.where(between, links.bytes_per_s, self.cluster.inside.bytes_per_s)
        per_byte = np.where(between, cpu.s_per_byte_between, cpu.s_per_byte_inside)
        half = (size * per_byte + cpu.s_per_message) / 2
        work = np.maximum(wire, half)
        link, core = np.where(between, wire, 0.0) / work, half / work
        threads = 2 * sites.hosts + sites.pools
        resource = [
            self.host[source],
            sites.hosts + self.host[target],
            self._pool(source),
            self._pool(target),
            threads + source,
            threads + target,
        ]
        link = link * self._on_host
        load = [link, link, core / self._cores, core / self._cores, core, core]
        return work, np.stack(resource, axis=1), np.stack(load, axis=1)

    def queue(self, between: NDArray[np.bool_], target: Ints, num_rounds: int) -> Queue | None:
        """Return where words that a receiver is ready queue: on the link out of its host."""
        links = self.cluster.between
        most_s = links.queued_bytes / links.bytes_per_s * self._on_host
        if not most_s or not between.any():
            return None
        behind = np.where(between, self.host[target], -1)
        rounds = np.full(num_rounds, -1)
        return Queue(
            np.concatenate([behind, rounds]),
            np.concatenate([np.where(between, most_s, 0.0), np.zeros(num_rounds)]),
        )

    def additions(self, added: Floats, rank: Ints) -> tuple[Floats, Ints, Floats]:
        """Return the same for the additions of each round, which one core does."""
        resource = np.zeros((len(rank), 6), dtype=np.int64)
        load = np.zeros((len(rank), 6))
        resource[:, 0] = self._pool(rank)
        work = added * self.cluster.cpu.s_per_byte_added
        load[work > 0, 0] = 1 / self._cores
        return work, resource, load


def _some(messages: Messages, kept: NDArray[np.bool_]) -> Messages:
    if kept.all():
        return messages
    return Messages(
        messages.source[kept],
        messages.target[kept],
        messages.start[kept],
        messages.stop[kept],
        messages.added[kept],
        messages.way[kept],
    )


def edges(messages: Messages, rounds: Rounds) -> tuple[Ints, Ints]:
    """Return what waits for what: tasks are the messages, then the ends of the rounds."""
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
    lone = empty[rounds.later]
    earlier.append(num + rounds.earlier[lone])
    later.append(num + rounds.later[lone])
    return np.concatenate(earlier), np.concatenate(later)

"""The input and output of the event engine: tasks with dependencies on shared resources.

A task waits for its predecessors, then for a fixed delay (a latency), and then works. Its work is
given in seconds at full speed. At full speed it takes a share of the capacity of each resource that
it uses. Where the demand for a resource exceeds its capacity, the tasks that use it slow down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stretto.errors import ScheduleError
from stretto.telemetry.timeline import Span, Timeline

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def sum_by_index(index: Ints, amount: Floats, num_indices: int) -> Floats:
    """Return the sum of the amounts of each index from 0 to ``num_indices`` - 1."""
    total = np.bincount(index.ravel(), weights=amount.ravel(), minlength=num_indices)
    return total.astype(np.float64)


@dataclass(frozen=True, slots=True)
class LinkQueue:
    """Queues on resources: the ready message of a starting task waits behind queued work.

    Before a message starts, its receiver tells the sender that it is ready. That small message
    passes the queue of the link out of the receiver's host. One entry for each task.
    """

    queue_resource: Ints
    """The resource whose queue the ready message passes; -1 where there is none."""
    max_queued_s: Floats
    """How much of its own work a working task keeps in the queue of the first resource it uses,
    at most, in seconds of that resource."""

    def queue_delays_s(self, tasks: "Tasks", working: Ints, remaining_s: Floats) -> Floats:
        """Return the queueing delay of each resource while the tasks ``working`` run."""
        queued_s = np.minimum(remaining_s * tasks.load[working, 0], self.max_queued_s[working])
        return sum_by_index(tasks.resource[working, 0], queued_s, tasks.num_resources)


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks as columns; row i of ``resource`` and ``load`` belongs to task i."""

    delay_s: Floats
    """Fixed delay in seconds between the last predecessor's end and the work."""
    work_s: Floats
    """Seconds of work at full speed; zero for tasks that only join others."""
    resource: Ints
    """[task, use]: a resource that the task uses; arbitrary where the load is zero."""
    load: Floats
    """[task, use]: share of the resource's capacity that the task takes at full speed."""
    earlier: Ints
    later: Ints
    """Dependency edges: task ``later[i]`` starts after task ``earlier[i]`` has ended."""
    num_resources: int
    queue: "LinkQueue | None" = None
    """Queueing delays of starting tasks; None for no queues."""

    def __len__(self) -> int:
        return len(self.work_s)

    @property
    def busy_s(self) -> Floats:
        """Return for each resource the seconds at full capacity that all tasks take together."""
        return sum_by_index(self.resource, self.load * self.work_s[:, None], self.num_resources)


class DependencyTracker:
    """Counts unfinished predecessors, for callers that end many tasks at once."""

    def __init__(self, earlier: Ints, later: Ints, count: int) -> None:
        self._successor, self._first = successors(earlier, later, count)
        self._num_unmet = np.bincount(later, minlength=count)
        self._last_position = np.empty(count, dtype=np.int64)

    def ready(self) -> Ints:
        """Return the tasks without unfinished predecessors."""
        return np.flatnonzero(self._num_unmet == 0)

    def release(self, ended: Ints) -> Ints:
        """Mark ``ended`` as finished; return the tasks whose last predecessor is among them."""
        first, count = self._first[ended], self._first[ended + 1] - self._first[ended]
        total = int(count.sum())
        if not total:
            return np.empty(0, dtype=np.int64)
        within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
        freed: Ints = self._successor[np.repeat(first, count) + within]
        np.subtract.at(self._num_unmet, freed, 1)
        free: Ints = freed[self._num_unmet[freed] == 0]
        # A task with several predecessors in ``ended`` occurs several times: keep the last one.
        position = np.arange(len(free))
        self._last_position[free] = position
        once: Ints = free[self._last_position[free] == position]
        return once


def successors(earlier: Ints, later: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the successors of all tasks, concatenated, and the first index of each task's."""
    order = np.argsort(earlier, kind="stable")
    each = np.bincount(earlier, minlength=count)
    return later[order], np.concatenate([[0], np.cumsum(each)])


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """When each task started and ended, in seconds."""

    start_s: Floats
    """When the last predecessor had ended; the task's delay comes after."""
    end_s: Floats

    @property
    def seconds(self) -> float:
        """Return when the last task ended."""
        return float(self.end_s.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Job:
    """A task with names, for callers that add tasks one by one."""

    name: str
    rank: int
    lane: str
    """Jobs of one rank and lane run in the order they are given."""
    work_s: float
    delay_s: float = 0.0
    uses: Mapping[str, float] = field(default_factory=dict)
    """The share of each resource, by name, that the job takes at full speed."""
    after: Sequence[int] = ()
    """Indices of earlier jobs, on any lane, that must end before this one starts."""


def tasks_of(jobs: Sequence[Job]) -> Tasks:
    """Return ``jobs`` as columns; each job starts after the previous one of its rank and lane.

    Raises:
        ScheduleError: A job waits for a job that is not before it.
    """
    names = {name: i for i, name in enumerate(dict.fromkeys(n for job in jobs for n in job.uses))}
    width = max((len(job.uses) for job in jobs), default=0)
    resource = np.zeros((len(jobs), max(width, 1)), dtype=np.int64)
    load = np.zeros_like(resource, dtype=np.float64)
    pairs: list[tuple[int, int]] = []
    last: dict[tuple[int, str], int] = {}
    for index, job in enumerate(jobs):
        for use, (name, share) in enumerate(job.uses.items()):
            resource[index, use], load[index, use] = names[name], share
        before = {*job.after, *([last[job.rank, job.lane]] if (job.rank, job.lane) in last else [])}
        if any(not 0 <= earlier < index for earlier in before):
            raise ScheduleError(f"job {index} ({job.name}) waits for {job.after}, not all earlier")
        pairs += [(earlier, index) for earlier in sorted(before)]
        last[job.rank, job.lane] = index
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    delay = np.array([job.delay_s for job in jobs], dtype=np.float64)
    work = np.array([job.work_s for job in jobs], dtype=np.float64)
    return Tasks(delay, work, resource, load, edges[:, 0], edges[:, 1], len(names))


def timelines_of(jobs: Sequence[Job], times: TaskTimes) -> tuple[Timeline, ...]:
    """Return the spans of each rank's jobs, rank by rank."""
    spans: dict[int, list[Span]] = {job.rank: [] for job in jobs}
    for job, start_s, end_s in zip(jobs, times.start_s.tolist(), times.end_s.tolist(), strict=True):
        spans[job.rank].append(Span(job.name, job.lane, start_s, end_s))
    return tuple(Timeline(rank, tuple(of_rank)) for rank, of_rank in sorted(spans.items()))

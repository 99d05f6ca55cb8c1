"""What the engine runs: tasks that wait for one another, then share what they work on.

A task waits for others, then for a fixed delay (a latency), and then works: so many seconds, if it
were alone. While it works at full speed it takes a share of the capacity of each resource it uses;
where several want more than there is, all of them slow down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stretto.errors import ScheduleError
from stretto.telemetry.timeline import Span, Timeline

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def summed(place: Ints, amount: Floats, num_places: int) -> Floats:
    """Return the sum of the amounts at each place."""
    total = np.bincount(place.ravel(), weights=amount.ravel(), minlength=num_places)
    return total.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Queue:
    """A resource is a line: a word that asks for a task to start stands in it behind others' work.

    A column for each task.
    """

    behind: Ints
    """The resource in whose line the word stands; -1 where there is none."""
    most_s: Floats
    """How much of its own work, in seconds of the first resource it uses, a task that is under way
    has standing in that one's line."""

    def waits_s(self, tasks: "Tasks", working: Ints, left_s: Floats) -> Floats:
        """Return for each resource how long the line is, given what is left of ``working``."""
        standing = np.minimum(left_s * tasks.load[working, 0], self.most_s[working])
        return summed(tasks.resource[working, 0], standing, tasks.num_resources)


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks as columns; a row of ``resource`` and ``load`` is what one of them uses."""

    delay_s: Floats
    work_s: Floats
    """Seconds of work at full speed; zero for what only joins others."""
    resource: Ints
    """[task, use]: which resource; any where the load is zero."""
    load: Floats
    """[task, use]: share of the resource's capacity that it takes at full speed."""
    earlier: Ints
    later: Ints
    """Pairs: ``later[i]`` starts when ``earlier[i]`` has ended, among others."""
    num_resources: int
    queue: "Queue | None" = None
    """Where what works on a resource holds up what is about to start; nowhere when None."""

    def __len__(self) -> int:
        return len(self.work_s)

    @property
    def busy_s(self) -> Floats:
        """Return for each resource how long it works for them at full capacity, in all."""
        return summed(self.resource, self.load * self.work_s[:, None], self.num_resources)


class Waits:
    """What still waits for what, for whoever ends many things at once."""

    def __init__(self, earlier: Ints, later: Ints, count: int) -> None:
        self._successor, self._first = successors(earlier, later, count)
        self._missing = np.bincount(later, minlength=count)
        self._turn = np.empty(count, dtype=np.int64)

    def over(self) -> Ints:
        """Return what waits for nothing."""
        return np.flatnonzero(self._missing == 0)

    def release(self, ended: Ints) -> Ints:
        """Return those for which one of ``ended`` was the last they waited for."""
        first, count = self._first[ended], self._first[ended + 1] - self._first[ended]
        total = int(count.sum())
        if not total:
            return np.empty(0, dtype=np.int64)
        within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
        freed: Ints = self._successor[np.repeat(first, count) + within]
        np.subtract.at(self._missing, freed, 1)
        free: Ints = freed[self._missing[freed] == 0]
        turn = np.arange(len(free))
        self._turn[free] = turn
        once: Ints = free[self._turn[free] == turn]  # also if several let it go at once
        return once


def successors(earlier: Ints, later: Ints, count: int) -> tuple[Ints, Ints]:
    """Return all successors, one task's after another's, and where each task's begin."""
    order = np.argsort(earlier, kind="stable")
    each = np.bincount(earlier, minlength=count)
    return later[order], np.concatenate([[0], np.cumsum(each)])


@dataclass(frozen=True, slots=True)
class Run:
    """When each task started, waits for others over, and when it ended."""

    start_s: Floats
    end_s: Floats

    @property
    def seconds(self) -> float:
        """Return when the last task ended."""
        return float(self.end_s.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Job:
    """A task with names, for whoever puts tasks together one by one."""

    name: str
    rank: int
    lane: str
    """Jobs of one rank and lane run in the order they are given."""
    work_s: float
    delay_s: float = 0.0
    uses: Mapping[str, float] = field(default_factory=dict)
    """Resource by name, and the share of it that the job takes at full speed."""
    after: Sequence[int] = ()
    """Earlier jobs, by index, on any lane."""


def tasks_of(jobs: Sequence[Job]) -> Tasks:
    """Return ``jobs`` as columns, each after its lane's previous one."""
    names = {name: i for i, name in enumerate(dict.fromkeys(n for job in jobs for n in job.uses))}
    width = max((len(job.uses) for job in jobs), default=0)
    resource = np.zeros((len(jobs), max(width, 1)), dtype=np.int64)
    load = np.zeros_like(resource, dtype=np.float64)
    pairs: list[tuple[int, int]] = []
    last: dict[tuple[int, str], int] = {}
    for index, job in enumerate(jobs):
        for place, (name, share) in enumerate(job.uses.items()):
            resource[index, place], load[index, place] = names[name], share
        before = {*job.after, *([last[job.rank, job.lane]] if (job.rank, job.lane) in last else [])}
        if any(not 0 <= earlier < index for earlier in before):
            raise ScheduleError(f"job {index} ({job.name}) waits for {job.after}, not all earlier")
        pairs += [(earlier, index) for earlier in sorted(before)]
        last[job.rank, job.lane] = index
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    delay = np.array([job.delay_s for job in jobs], dtype=np.float64)
    work = np.array([job.work_s for job in jobs], dtype=np.float64)
    return Tasks(delay, work, resource, load, edges[:, 0], edges[:, 1], len(names))


def timelines_of(jobs: Sequence[Job], run: Run) -> tuple[Timeline, ...]:
    """Return what each rank did when."""
    spans: dict[int, list[Span]] = {job.rank: [] for job in jobs}
    for job, start_s, end_s in zip(jobs, run.start_s.tolist(), run.end_s.tolist(), strict=True):
        spans[job.rank].append(Span(job.name, job.lane, start_s, end_s))
    return tuple(Timeline(rank, tuple(of_rank)) for rank, of_rank in sorted(spans.items()))

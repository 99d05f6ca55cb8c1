"""The event engine: runs tasks on shared resources and says when each began and ended.

Between two events speeds are constant; an event is a latency that is over or a task that is done.
What happens at the same time, to rounding, is one event, so a thousand ranks in step cost as much
as one. Nothing is random: the same tasks give the same times.

Two loops do the same: one walks over single tasks and keeps the speeds of every mixture it has met;
the other works on whole columns, which pays where hundreds of tasks are under way at once.
"""

import heapq
import itertools
import math
from collections.abc import Callable

import numpy as np

from stretto.errors import ScheduleError, StrettoError
from stretto.sim.fair import Uses, fair_speeds, fair_speeds_of_few
from stretto.sim.tasks import Floats, Ints, Queue, Run, Tasks, Waits, successors

FEW_RESOURCES = 80
MANY_AT_ONCE = 150
"""Tasks under way from which on an event costs less by column than task by task."""
PATIENCE = 500
"""Events after which the loop over columns asks itself whether it is worth it."""
MOST_EVENTS = 1_000_000
"""Minutes, in either loop."""
_NEAR = 1e-9
"""Events that lie closer together than this share of the time since the last one are one."""
_ROUNDING = 1e-13


def run(tasks: Tasks) -> Run:
    """Return when each of ``tasks`` starts and ends."""
    if tasks.num_resources > FEW_RESOURCES:
        result = _Columns(tasks).run(patience=PATIENCE)
        if result is not None:
            return result
    return run_single(tasks)


def run_single(tasks: Tasks) -> Run:
    """Run task by task."""
    return _Single(tasks).run()


def run_columns(tasks: Tasks) -> Run:
    """Run column by column."""
    result = _Columns(tasks).run()
    assert result is not None, "without patience there is no giving up"
    return result


class _Single:
    """The loop over single tasks; everything is a plain list, which is what Python is fast at."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._kind, self._speeds = _kinds(tasks)
        self._delay, self._left = tasks.delay_s.tolist(), tasks.work_s.tolist()
        order, starts = successors(tasks.earlier, tasks.later, len(tasks))
        flat, bounds = order.tolist(), starts.tolist()
        self._after = [flat[a:b] for a, b in itertools.pairwise(bounds)]
        self._missing = np.bincount(tasks.later, minlength=len(tasks)).tolist()
        self._start, self._end = [-1.0] * len(tasks), [-1.0] * len(tasks)
        self._coming: list[tuple[float, int]] = []
        self._working: list[int] = []

    def run(self) -> Run:
        now, events = 0.0, 0
        self._settle([i for i, n in enumerate(self._missing) if not n], [], now)
        while self._working or self._coming:
            events += 1
            _check(events)
            now = self._advance(now)
        result = Run(np.array(self._start), np.array(self._end))
        _check_ended(result)
        return result

    def _advance(self, now: float) -> float:
        """Go to the next event and settle it; return its time."""
        left, kind = self._left, self._kind
        speeds = self._speeds(tuple(sorted(kind[i] for i in self._working)))
        needs = [left[i] / speeds[kind[i]] for i in self._working]
        then = now + min(needs, default=math.inf)
        if self._coming:
            then = min(then, self._coming[0][0])
        passed = then - now
        slack = passed * _NEAR + then * _ROUNDING
        done, working = [], []
        for i, need in zip(self._working, needs, strict=True):
            if need <= passed + slack:
                done.append(i)
            else:
                left[i] -= passed * speeds[kind[i]]
                working.append(i)
        self._working = working
        arrived = []
        while self._coming and self._coming[0][0] <= then + slack:
            arrived.append(heapq.heappop(self._coming)[1])
        for i in arrived:
            (self._working if left[i] > 0 else done).append(i)
        self._settle([], done, then)
        return then

    def _settle(self, ready: list[int], done: list[int], now: float) -> None:
        """Note what ends at ``now``, and start what that lets start, until nothing changes."""
        while ready or done:
            for i in done:
                self._end[i] = now
                for successor in self._after[i]:
                    self._missing[successor] -= 1
                    if not self._missing[successor]:
                        ready.append(successor)
            done = []
            waits_s = self._waits_s(ready)
            for i, wait_s in zip(ready, waits_s, strict=True):
                self._start[i] = now
                if self._delay[i] + wait_s > 0:
                    heapq.heappush(self._coming, (now + self._delay[i] + wait_s, i))
                elif self._left[i] > 0:
                    self._working.append(i)
                else:
                    done.append(i)
            ready = []

    def _waits_s(self, ready: list[int]) -> list[float]:
        """Return how long each of ``ready`` stands in a line before its delay begins to count."""
        queue = self._tasks.queue
        if queue is None or not ready or not self._working:
            return [0.0] * len(ready)
        working = np.array(self._working)
        left_s = np.array([self._left[i] for i in self._working])
        waits_s: list[float] = _lines(self._tasks, queue, working, left_s, np.array(ready)).tolist()
        return waits_s


class _Columns:
    """The loop over columns: what happens at one time is one array of task numbers."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._waits = Waits(tasks.earlier, tasks.later, len(tasks))
        self._start, self._end = np.full(len(tasks), -1.0), np.full(len(tasks), -1.0)
        self._coming: list[tuple[float, int, Ints]] = []
        self._pushed = 0
        self._working: Ints = np.empty(0, dtype=np.int64)
        self._left: Floats = np.empty(0)
        self._speed: Floats = np.empty(0)
        self._changed = False

    def run(self, patience: int | None = None) -> Run | None:
        """Return None where few tasks were under way in the first ``patience`` events."""
        now, events, at_once = 0.0, 0, 0
        self._settle(self._waits.over(), now)
        while self._working.size or self._coming:
            events += 1
            at_once += len(self._working)
            if events == patience and at_once < MANY_AT_ONCE * events:
                return None
            _check(events)
            now = self._advance(now)
        result = Run(self._start, self._end)
        _check_ended(result)
        return result

    def _advance(self, now: float) -> float:
        """Go to the next event and settle it; return its time."""
        if self._changed:
            self._share()
        needs = self._left / self._speed
        then = now + float(needs.min(initial=np.inf))
        if self._coming:
            then = min(then, self._coming[0][0])
        passed = then - now
        slack = passed * _NEAR + then * _ROUNDING
        over = needs <= passed + slack
        done = [self._working[over]]
        self._left = (self._left - passed * self._speed)[~over]
        self._working = self._working[~over]
        self._speed = self._speed[~over]
        self._changed |= bool(done[0].size)
        while self._coming and self._coming[0][0] <= then + slack:
            done.append(self._begin(heapq.heappop(self._coming)[2]))
        ended = np.concatenate(done)
        self._end[ended] = then
        self._settle(self._waits.release(ended), then)
        return then

    def _settle(self, ready: Ints, now: float) -> None:
        """Start what is ready, and what ends at once with that, until nothing changes."""
        while ready.size:
            self._start[ready] = now
            delay = self._tasks.delay_s[ready]
            if self._tasks.queue is not None and self._working.size:
                queue, tasks = self._tasks.queue, self._tasks
                delay = delay + _lines(tasks, queue, self._working, self._left, ready)
            for value in np.unique(delay[delay > 0]).tolist():
                self._pushed += 1
                entry = (now + value, self._pushed, ready[delay == value])
                heapq.heappush(self._coming, entry)
            ended = self._begin(ready[delay == 0])
            self._end[ended] = now
            ready = self._waits.release(ended)

    def _begin(self, arrived: Ints) -> Ints:
        """Let ``arrived`` work; return those that have nothing to do."""
        work = self._tasks.work_s[arrived]
        self._changed |= bool((work > 0).any())
        self._working = np.concatenate([self._working, arrived[work > 0]])
        self._left = np.concatenate([self._left, work[work > 0]])
        idle: Ints = arrived[work == 0]
        return idle

    def _share(self) -> None:
        tasks, working = self._tasks, self._working
        once = np.ones(len(working))
        self._speed = fair_speeds(
            tasks.resource[working], tasks.load[working], once, tasks.num_resources
        )
        self._changed = False


def _lines(tasks: Tasks, queue: Queue, working: Ints, left_s: Floats, ready: Ints) -> Floats:
    """Return how long each of ``ready`` stands in the line it has to."""
    behind = queue.behind[ready]
    lines = queue.waits_s(tasks, working, left_s)
    waits_s: Floats = np.where(behind >= 0, lines[behind], 0.0)
    return waits_s


Mixture = tuple[int, ...]
"""The kinds of the tasks that are working, sorted."""
_MOST_KNOWN = 5000


def _kinds(tasks: Tasks) -> tuple[list[int], Callable[[Mixture], dict[int, float]]]:
    """Return each task's kind, alike where they use the same, and the speeds in any mixture."""
    row = np.where(tasks.load > 0, tasks.resource, -1)
    rows = np.ascontiguousarray(np.concatenate([row.astype(np.float64), tasks.load], axis=1))
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    _, first, kind = np.unique(whole, return_index=True, return_inverse=True)
    uses = [_uses(tasks, task) for task in first.tolist()]
    known: dict[Mixture, dict[int, float]] = {}

    def speeds(mixture: Mixture) -> dict[int, float]:
        found = known.get(mixture)
        if found is None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            found = known[mixture] = dict(
                zip(mixture, fair_speeds_of_few([uses[kind] for kind in mixture]), strict=True)
            )
        return found

    return kind.ravel().tolist(), speeds


def _uses(tasks: Tasks, task: int) -> Uses:
    """Return what a task uses, a resource named twice joined."""
    joined: dict[int, float] = {}
    for resource, load in zip(
        tasks.resource[task].tolist(), tasks.load[task].tolist(), strict=True
    ):
        if load > 0:
            joined[resource] = joined.get(resource, 0.0) + load
    return tuple(joined.items())


def _check(events: int) -> None:
    if events > MOST_EVENTS:
        raise StrettoError(
            f"the simulation was given up after {MOST_EVENTS:,} events: its tasks hardly ever "
            "happen together; describe fewer ranks, or hosts with equally many ranks"
        )


def _check_ended(result: Run) -> None:
    stuck = np.flatnonzero(result.end_s < 0)
    if stuck.size:
        raise ScheduleError(
            f"{stuck.size} tasks never end, task {stuck[0]} the first: they wait in a circle"
        )

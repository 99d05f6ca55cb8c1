"""The event engine: simulate tasks on shared resources and return their start and end times.

An event is the end of delays or tasks at one time, to rounding: a thousand ranks in step cost as
much as one. Speeds are constant between two events. The simulation is deterministic.

Two loops give the same times. `_TaskLoop` loops over single tasks and caches the speeds of every
combination of task kinds. `_VectorizedLoop` works on whole columns, which is faster where hundreds
of tasks run at once.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from stretto.errors import ScheduleError, StrettoError
from stretto.simulator.tasks import (
    DependencyTracker,
    Floats,
    Ints,
    LinkQueue,
    Tasks,
    TaskTimes,
    successors,
    sum_by_index,
)

# --- speeds: max-min fairness by progressive filling ---

ResourceShares = tuple[tuple[int, float], ...]
"""Pairs (resource, share of its capacity taken at full speed); each resource occurs once."""
_TIE = 1e-12
"""Relative difference up to which two fill levels are equal."""


def fair_speeds(resource: Ints, load: Floats, count: Floats, num_resources: int) -> Floats:
    """Return the max-min fair speed, at most 1, of each kind of working task.

    All speeds grow together until a resource is full. Its tasks keep that speed; the others go on
    growing (Bertsekas and Gallager, Data Networks, 1992, 6.5.2). One pass fixes several resources
    at once: each one whose fill level is the lowest among all resources of all its tasks. No other
    resource can change that level.

    Args:
        resource: [kind, use], the resources that a task of each kind uses.
        load: [kind, use], the share of the resource that one task takes at full speed.
        count: Number of working tasks of each kind.
        num_resources: Resources are numbered from 0 up to it.
    """
    speed = np.ones(len(load))
    if load.size < num_resources:  # few tasks among many resources: drop the idle resources
        names, renamed = np.unique(resource, return_inverse=True)
        resource, num_resources = renamed.reshape(resource.shape), len(names)
    used = load * count[:, None]
    if sum_by_index(resource, used, num_resources).max(initial=0.0) <= 1 + _TIE:
        return speed
    free = np.ones(num_resources)
    growing = np.arange(len(load))
    while growing.size:
        uses, is_used = resource[growing], load[growing] > 0
        demand = sum_by_index(uses, used[growing], num_resources)
        level = np.full(num_resources, np.inf)
        np.divide(free, demand, out=level, where=demand > 0)
        limit = np.where(is_used, level[uses], np.inf).min(axis=1).clip(max=1.0)
        lowest_limit = np.full(num_resources, np.inf)
        limit_by_use = np.where(is_used, limit[:, None], np.inf)
        np.minimum.at(lowest_limit, uses.ravel(), limit_by_use.ravel())
        is_full = level <= lowest_limit * (1 + _TIE)
        is_fixed = (limit >= 1) | (is_full[uses] & is_used).any(axis=1)
        speed[growing[is_fixed]] = limit[is_fixed]
        free -= sum_by_index(
            uses[is_fixed], used[growing[is_fixed]] * limit[is_fixed, None], num_resources
        )
        np.maximum(free, 0.0, out=free)
        growing = growing[~is_fixed]
    return speed


def fair_speeds_of_few(uses: Sequence[ResourceShares]) -> list[float]:
    """Return the same, given the shares of each single task; faster for up to a few dozen."""
    speed = [1.0] * len(uses)
    demand: dict[int, float] = {}
    users: dict[int, list[int]] = {}
    for task, used in enumerate(uses):
        for resource, load in used:
            demand[resource] = demand.get(resource, 0.0) + load
            users.setdefault(resource, []).append(task)
    free = {resource: 1.0 for resource, load in demand.items() if load > 1 + _TIE}
    left = {resource: len(users[resource]) for resource in free}
    is_fixed = [False] * len(uses)
    while free:
        level, tightest = min([(free[r] / demand[r], r) for r in free])
        if level >= 1:
            break
        for task in users[tightest]:
            if is_fixed[task]:
                continue
            is_fixed[task], speed[task] = True, level
            for resource, load in uses[task]:
                if resource in free:
                    free[resource] -= load * level
                    demand[resource] -= load
                    left[resource] -= 1
                    if not left[resource]:
                        del free[resource]
    return speed


# --- the loops ---

FEW_RESOURCES = 80
"""Up to this many resources the task loop is used without trying the vectorized one."""
MIN_CONCURRENT_TASKS = 150
"""Working tasks from which on the vectorized loop handles an event faster."""
TRIAL_EVENTS = 500
"""Events after which the vectorized loop gives up if too few tasks work at once."""
MAX_EVENTS = 1_000_000
"""Limit on the events of a simulation; either loop takes minutes for them."""
_EVENT_TOLERANCE = 1e-9
"""Events closer together than this share of the time since the last event are one event."""
_ROUNDING = 1e-13
"""Events closer together than this share of the current time are one event."""


def run(tasks: Tasks) -> TaskTimes:
    """Simulate ``tasks`` with the loop that suits them; return their start and end times.

    Raises:
        ScheduleError: Some tasks never start because they wait for each other.
        StrettoError: The simulation needs more than `MAX_EVENTS` events.
    """
    if tasks.num_resources > FEW_RESOURCES:
        result = _VectorizedLoop(tasks).run(trial_events=TRIAL_EVENTS)
        if result is not None:
            return result
    return run_task_by_task(tasks)


def run_task_by_task(tasks: Tasks) -> TaskTimes:
    """Simulate ``tasks`` with the task loop."""
    return _TaskLoop(tasks).run()


def run_vectorized(tasks: Tasks) -> TaskTimes:
    """Simulate ``tasks`` with the vectorized loop, however few work at once."""
    result = _VectorizedLoop(tasks).run()
    assert result is not None, "run() without trial_events always returns times"
    return result


class _TaskLoop:
    """The loop over single tasks; it uses plain lists, which are faster than arrays here."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._kind, self._speeds = _group_by_kind(tasks)
        self._delay, self._remaining_s = tasks.delay_s.tolist(), tasks.work_s.tolist()
        order, starts = successors(tasks.earlier, tasks.later, len(tasks))
        flat, bounds = order.tolist(), starts.tolist()
        self._successors = [flat[a:b] for a, b in itertools.pairwise(bounds)]
        self._num_unmet = np.bincount(tasks.later, minlength=len(tasks)).tolist()
        self._start, self._end = [-1.0] * len(tasks), [-1.0] * len(tasks)
        self._in_delay: list[tuple[float, int]] = []
        self._working: list[int] = []

    def run(self) -> TaskTimes:
        now, events = 0.0, 0
        self._finish_and_start([i for i, n in enumerate(self._num_unmet) if not n], [], now)
        while self._working or self._in_delay:
            events += 1
            _check_event_limit(events)
            now = self._advance(now)
        result = TaskTimes(np.array(self._start), np.array(self._end))
        _check_all_ended(result)
        return result

    def _advance(self, now: float) -> float:
        """Advance to the next event and process it; return its time."""
        remaining_s, kind = self._remaining_s, self._kind
        speeds = self._speeds(tuple(sorted(kind[i] for i in self._working)))
        needs_s = [remaining_s[i] / speeds[kind[i]] for i in self._working]
        then = now + min(needs_s, default=math.inf)
        if self._in_delay:
            then = min(then, self._in_delay[0][0])
        passed = then - now
        slack = passed * _EVENT_TOLERANCE + then * _ROUNDING
        done, working = [], []
        for i, need_s in zip(self._working, needs_s, strict=True):
            if need_s <= passed + slack:
                done.append(i)
            else:
                remaining_s[i] -= passed * speeds[kind[i]]
                working.append(i)
        self._working = working
        arrived = []
        while self._in_delay and self._in_delay[0][0] <= then + slack:
            arrived.append(heapq.heappop(self._in_delay)[1])
        for i in arrived:
            (self._working if remaining_s[i] > 0 else done).append(i)
        self._finish_and_start([], done, then)
        return then

    def _finish_and_start(self, ready: list[int], done: list[int], now: float) -> None:
        """End ``done`` and start ``ready`` at ``now``, and all that follows at the same time."""
        while ready or done:
            for i in done:
                self._end[i] = now
                for successor in self._successors[i]:
                    self._num_unmet[successor] -= 1
                    if not self._num_unmet[successor]:
                        ready.append(successor)
            done = []
            queue_delays_s = self._start_delays_s(ready)
            for i, wait_s in zip(ready, queue_delays_s, strict=True):
                self._start[i] = now
                if self._delay[i] + wait_s > 0:
                    heapq.heappush(self._in_delay, (now + self._delay[i] + wait_s, i))
                elif self._remaining_s[i] > 0:
                    self._working.append(i)
                else:
                    done.append(i)
            ready = []

    def _start_delays_s(self, ready: list[int]) -> list[float]:
        """Return the queueing delay of each task in ``ready``, which comes before its own delay."""
        queue = self._tasks.queue
        if queue is None or not ready or not self._working:
            return [0.0] * len(ready)
        working = np.array(self._working)
        remaining_s = np.array([self._remaining_s[i] for i in self._working])
        queue_delays_s: list[float] = _queue_delays_s(
            self._tasks, queue, working, remaining_s, np.array(ready)
        ).tolist()
        return queue_delays_s


class _VectorizedLoop:
    """The loop over columns: all tasks that change at one time are one array of indices."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._dependencies = DependencyTracker(tasks.earlier, tasks.later, len(tasks))
        self._start, self._end = np.full(len(tasks), -1.0), np.full(len(tasks), -1.0)
        self._in_delay: list[tuple[float, int, Ints]] = []
        self._pushed = 0
        self._working: Ints = np.empty(0, dtype=np.int64)
        self._remaining_s: Floats = np.empty(0)
        self._speed: Floats = np.empty(0)
        self._changed = False

    def run(self, trial_events: int | None = None) -> TaskTimes | None:
        """Simulate all tasks; None if few of them worked in the first ``trial_events`` events."""
        now, events, num_working = 0.0, 0, 0
        self._finish_and_start(self._dependencies.ready(), now)
        while self._working.size or self._in_delay:
            events += 1
            num_working += len(self._working)
            if events == trial_events and num_working < MIN_CONCURRENT_TASKS * events:
                return None
            _check_event_limit(events)
            now = self._advance(now)
        result = TaskTimes(self._start, self._end)
        _check_all_ended(result)
        return result

    def _advance(self, now: float) -> float:
        """Advance to the next event and process it; return its time."""
        if self._changed:
            self._update_speeds()
        needs = self._remaining_s / self._speed
        then = now + float(needs.min(initial=np.inf))
        if self._in_delay:
            then = min(then, self._in_delay[0][0])
        passed = then - now
        slack = passed * _EVENT_TOLERANCE + then * _ROUNDING
        is_done = needs <= passed + slack
        done = [self._working[is_done]]
        self._remaining_s = (self._remaining_s - passed * self._speed)[~is_done]
        self._working = self._working[~is_done]
        self._speed = self._speed[~is_done]
        self._changed |= bool(done[0].size)
        while self._in_delay and self._in_delay[0][0] <= then + slack:
            done.append(self._start_work(heapq.heappop(self._in_delay)[2]))
        ended = np.concatenate(done)
        self._end[ended] = then
        self._finish_and_start(self._dependencies.release(ended), then)
        return then

    def _finish_and_start(self, ready: Ints, now: float) -> None:
        """Start ``ready`` at ``now``, and all tasks that follow at the same time."""
        while ready.size:
            self._start[ready] = now
            delay = self._tasks.delay_s[ready]
            if self._tasks.queue is not None and self._working.size:
                queue, tasks = self._tasks.queue, self._tasks
                delay = delay + _queue_delays_s(
                    tasks, queue, self._working, self._remaining_s, ready
                )
            for value in np.unique(delay[delay > 0]).tolist():
                self._pushed += 1
                entry = (now + value, self._pushed, ready[delay == value])
                heapq.heappush(self._in_delay, entry)
            ended = self._start_work(ready[delay == 0])
            self._end[ended] = now
            ready = self._dependencies.release(ended)

    def _start_work(self, arrived: Ints) -> Ints:
        """Start the work of ``arrived``, whose delay is over; return the tasks without work."""
        work = self._tasks.work_s[arrived]
        self._changed |= bool((work > 0).any())
        self._working = np.concatenate([self._working, arrived[work > 0]])
        self._remaining_s = np.concatenate([self._remaining_s, work[work > 0]])
        idle: Ints = arrived[work == 0]
        return idle

    def _update_speeds(self) -> None:
        tasks, working = self._tasks, self._working
        once = np.ones(len(working))
        self._speed = fair_speeds(
            tasks.resource[working], tasks.load[working], once, tasks.num_resources
        )
        self._changed = False


def _queue_delays_s(
    tasks: Tasks, queue: LinkQueue, working: Ints, remaining_s: Floats, ready: Ints
) -> Floats:
    """Return the delay of each task in ``ready`` in the queue that it has to pass."""
    queue_resource = queue.queue_resource[ready]
    delays_s = queue.queue_delays_s(tasks, working, remaining_s)
    queue_delays_s: Floats = np.where(queue_resource >= 0, delays_s[queue_resource], 0.0)
    return queue_delays_s


ActiveKinds = tuple[int, ...]
"""The kinds of the working tasks, sorted."""
_MAX_CACHED = 5000
"""Combinations of kinds whose speeds are kept."""


def _group_by_kind(tasks: Tasks) -> tuple[list[int], Callable[[ActiveKinds], dict[int, float]]]:
    """Return each task's kind, and a cached function from active kinds to the speed of each.

    Tasks that use the same shares of the same resources are of one kind.
    """
    row = np.where(tasks.load > 0, tasks.resource, -1)
    rows = np.ascontiguousarray(np.concatenate([row.astype(np.float64), tasks.load], axis=1))
    row_bytes = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    _, first, kind = np.unique(row_bytes, return_index=True, return_inverse=True)
    uses = [_combined_uses(tasks, task) for task in first.tolist()]
    cached: dict[ActiveKinds, dict[int, float]] = {}

    def speeds(active_kinds: ActiveKinds) -> dict[int, float]:
        found = cached.get(active_kinds)
        if found is None:
            if len(cached) >= _MAX_CACHED:
                cached.clear()
            found = cached[active_kinds] = dict(
                zip(
                    active_kinds,
                    fair_speeds_of_few([uses[kind] for kind in active_kinds]),
                    strict=True,
                )
            )
        return found

    return kind.ravel().tolist(), speeds


def _combined_uses(tasks: Tasks, task: int) -> ResourceShares:
    """Return the shares that a task uses; shares of the same resource are added."""
    joined: dict[int, float] = {}
    for resource, load in zip(
        tasks.resource[task].tolist(), tasks.load[task].tolist(), strict=True
    ):
        if load > 0:
            joined[resource] = joined.get(resource, 0.0) + load
    return tuple(joined.items())


def _check_event_limit(events: int) -> None:
    if events > MAX_EVENTS:
        raise StrettoError(
            f"the simulation was stopped after {MAX_EVENTS:,} events: its tasks rarely coincide; "
            "describe fewer ranks, or hosts with equally many ranks"
        )


def _check_all_ended(result: TaskTimes) -> None:
    stuck = np.flatnonzero(result.end_s < 0)
    if stuck.size:
        raise ScheduleError(
            f"{stuck.size} tasks never end, task {stuck[0]} the first: they wait for each other"
        )

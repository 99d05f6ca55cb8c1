"""A run of a plan on a profile, as far as it has come: what happens when, event by event.

The rules are those of the executor. A slot is entered when the one before it has run, and runs when
the messages due at it are over. A message is handed to the link once its moment has come, what it
carries is there, and all before it have been; lanes of the link take theirs one after another.
While a message travels, computation is slower by the profile's factor.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stretto.plan.check import ready_moment
from stretto.plan.profile import Profile
from stretto.plan.value import Message, Plan, What

_SAME = 1e-12


class Stretch(NamedTuple):
    """From when to when something went on, in seconds from the start of the step's backward."""

    start_s: float
    end_s: float


class Cycle(NamedTuple):
    """What happened in one."""

    step_s: float
    slots: list[Stretch]
    messages: list[Stretch]
    """The last time that each was carried, in the order of the plan."""


class Clock:
    """The computation's clock, which the link follows."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan, self._slots = plan, plan.slots
        checkpoints = [unit.checkpoint for unit in plan.units]
        self._lengths = profile.lengths(checkpoints, barrier=plan.barrier)
        self._slowdown = profile.slowdown
        self._durations = [profile.message_s(plan, m) for m in plan.messages]
        self._ready = [ready_moment(plan, message) for message in plan.messages]
        self._reductions = _reductions(plan)
        self._made_by = [_made_by(plan, m, self._reductions) for m in plan.messages]
        self._dues: list[list[int]] = [[] for _ in range(self._slots.count)]
        for index, message in enumerate(plan.messages):
            self._dues[message.due].append(index)
        self._link = Lanes(profile.link.lanes, profile.link.lane_share)
        self._now_s, self._cycle, self._moment = 0.0, -1, 0
        self._unmet = [0] * len(plan.messages)
        """Of each message, how many stand in line or are under way."""
        self._ahead = [
            m.what is What.REGATHER and self._slots.is_forward(m.gate) for m in plan.messages
        ]
        """Whether one of them is for the cycle that follows."""
        self._begun_s: dict[int, float] = {}
        self._carried = [Stretch(0.0, 0.0)] * len(plan.messages)
        self._over = [True] * len(plan.messages)
        """Of reductions: whether the last one has been carried."""
        starts = (i for i, m in enumerate(plan.messages) if self._is_of_first_forward(m))
        self._waiting: deque[tuple[int, int]] = deque()
        self._queue(starts)
        self._run_slots(range(self._slots.update + 1, self._slots.count))

    def _is_of_first_forward(self, message: Message) -> bool:
        if message.what is What.REGATHER:
            return self._slots.is_forward(message.gate)
        freed = self._plan.units[message.unit].sharding.is_freed
        return message.what is What.GATHER and freed

    def run_cycle(self) -> Cycle:
        """Run a backward, the update, and the forward of the next step."""
        self._cycle += 1
        self._queue(range(len(self._plan.messages)))
        began_s = self._now_s
        ran = self._run_slots(range(self._slots.count))
        return Cycle(self._now_s - began_s, _from(began_s, ran), _from(began_s, self._carried))

    def _queue(self, messages: Iterable[int]) -> None:
        for index in messages:
            self._waiting.append((self._cycle, index))
            self._unmet[index] += 1

    def _may_go(self, cycle: int, index: int) -> bool:
        """Say whether a message's moment has come, and what it carries is there."""
        if self._ready[index] + 2 * self._slots.count * cycle > self._moment:
            return False
        return all(self._over[reduction] for reduction in self._made_by[index])

    def _run_slots(self, slots: Iterable[int]) -> list[Stretch]:
        ran: list[Stretch] = []
        for slot in slots:
            self._arrive(2 * slot)
            while any(self._unmet[index] > self._ahead[index] for index in self._dues[slot]):
                self._end_next()
            start_s = self._now_s
            self._compute(self._lengths[slot])
            ran.append(Stretch(start_s, self._now_s))
            self._arrive(2 * slot + 1)
        return ran

    def _arrive(self, moment: int) -> None:
        self._moment = moment + 2 * self._slots.count * self._cycle
        self._begin_what_may()

    def _compute(self, work_s: float) -> None:
        """Let the link work until so much has been computed."""
        while (left_s := self._link.left_s()) <= work_s * self._slowdown:
            work_s -= left_s / self._slowdown
            self._end_next()
        if left_s < math.inf:
            work_s *= self._slowdown
            self._link.work(max(work_s, 0.0))
        self._now_s += max(work_s, 0.0)

    def _end_next(self) -> None:
        """Go on to the end of the next message; what ends lets others begin."""
        self._now_s += self._link.left_s()
        for index in self._link.end_next():
            self._unmet[index] -= 1
            self._carried[index] = Stretch(self._begun_s.pop(index), self._now_s)
            self._over[index] = True
        self._begin_what_may()

    def _begin_what_may(self) -> None:
        while self._waiting and self._may_go(*self._waiting[0]):
            _, index = self._waiting.popleft()
            self._over[index] = False
            message = self._plan.messages[index]
            lane = (message.unit + message.block) % self._link.count
            self._link.put(lane, index, self._durations[index])
        for index in self._link.under_way():
            self._begun_s.setdefault(index, self._now_s)


def _from(began_s: float, stretches: Sequence[Stretch]) -> list[Stretch]:
    return [Stretch(start_s - began_s, end_s - began_s) for start_s, end_s in stretches]


def _reductions(plan: Plan) -> dict[int, list[int]]:
    """Return the reductions of each unit."""
    found: dict[int, list[int]] = defaultdict(list)
    for index, message in enumerate(plan.messages):
        if message.what is What.REDUCE:
            found[message.unit].append(index)
    return found


def _made_by(plan: Plan, message: Message, reductions: dict[int, list[int]]) -> list[int]:
    """Return the reductions without which a gather has nothing new to carry."""
    if message.what is not What.GATHER:
        return []
    own = reductions[message.unit]
    return [i for i in own if plan.whole_layers or plan.messages[i].block == message.block]


class Lanes:
    """A link whose lanes each take one message after another, and share its rate evenly.

    One lane alone reaches ``most`` of it.
    """

    def __init__(self, count: int, most: float = 1.0) -> None:
        self.count, self._most = count, most
        self._queues: list[deque[list[float]]] = [deque() for _ in range(count)]

    def put(self, lane: int, index: int, duration_s: float) -> None:
        """Queue a message that would take so long alone."""
        self._queues[lane].append([index, duration_s])

    def under_way(self) -> list[int]:
        """Return what each lane is busy with."""
        return [int(queue[0][0]) for queue in self._queues if queue]

    def left_s(self) -> float:
        """Return in how long the next message ends, if nothing is put before."""
        heads = [queue[0][1] for queue in self._queues if queue]
        return min(heads) / self._pace(len(heads)) if heads else math.inf

    def _pace(self, busy: int) -> float:
        """Return which share of the rate each of the busy lanes has."""
        return min(1 / busy, self._most)

    def work(self, for_s: float) -> None:
        """Carry on for less than that."""
        busy = [queue for queue in self._queues if queue]
        for queue in busy:
            queue[0][1] -= for_s * self._pace(len(busy))

    def end_next(self) -> list[int]:
        """Carry on to the end of the next message; return what ends then."""
        busy = [queue for queue in self._queues if queue]
        least_s = min(queue[0][1] for queue in busy)
        ending = [queue for queue in busy if queue[0][1] <= least_s + _SAME]
        self.work(least_s / self._pace(len(busy)))
        return [int(queue.popleft()[0]) for queue in ending]

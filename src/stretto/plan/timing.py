"""When everything in a plan happens: slots and messages of one steady step, on a profile.

The rules are those of the executor. A slot is entered when the one before it has run, and runs when
the messages due at it are over. A message is handed to the link once its moment has come, what it
carries is there, and all before it have been; lanes of the link take theirs one after another.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from stretto.errors import ConfigError
from stretto.plan.check import ready_moment
from stretto.plan.profile import Profile, UnitCost
from stretto.plan.value import Message, Plan, Unit, What

_CYCLES = 64
_SAME = 1e-12


class Stretch(NamedTuple):
    """From when to when something went on, in seconds from the start of the step's backward."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timed:
    """One step of a run that has long begun."""

    step_s: float
    slots: tuple[Stretch, ...]
    """When each slot ran, without what it waited for."""
    messages: tuple[Stretch, ...]
    """When the link was busy with each message, in the order of the plan; the last ones may be
    carried only in the backward that follows."""

    @property
    def waited_s(self) -> float:
        """How long the computation stood still."""
        return self.step_s - sum(slot.end_s - slot.start_s for slot in self.slots)


def time_plan(plan: Plan, profile: Profile) -> Timed:
    """Return what a step of ``plan`` takes once steps are alike.

    Raises:
        ConfigError: The profile is one of another model.
    """
    for index, (unit, cost) in enumerate(zip_longest(plan.units, profile.units)):
        if unit is None or cost is None or (unit.name, unit.numel) != (cost.name, cost.numel):
            raise ConfigError(
                f"the profile is of another model: its unit {index} is {_called(cost)}, that of "
                f"the plan {_called(unit)}; make it anew"
            )
    run = _Run(plan, profile)
    run.forward()
    before_s = 0.0
    for _ in range(_CYCLES):
        timed = run.cycle()
        if abs(timed.step_s - before_s) <= _SAME * timed.step_s:
            break
        before_s = timed.step_s
    return timed


def _called(unit: Unit | UnitCost | None) -> str:
    return "missing" if unit is None else f"{unit.name} of {unit.numel} elements"


class _Run:
    """A run as far as it has come: the computation's clock, which the link follows."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan, self._slots = plan, plan.slots
        self._lengths = _lengths(plan, profile)
        self._durations = [profile.message_s(plan, m) for m in plan.messages]
        self._dues: dict[int, list[int]] = defaultdict(list)
        for index, message in enumerate(plan.messages):
            self._dues[message.due].append(index)
        self._link = _Lanes(profile.link.lanes)
        self._now_s, self._cycle, self._moment = 0.0, -1, 0
        self._unmet: dict[int, int] = defaultdict(int)
        self._began_s: dict[int, float] = {}
        self._carried = [Stretch(0.0, 0.0)] * len(plan.messages)
        self._reduced: set[tuple[int, int]] = set()
        starts = (i for i, m in enumerate(plan.messages) if self._is_of_first_forward(m))
        self._waiting: deque[tuple[int, int]] = deque((-1, index) for index in starts)
        for unit, planned in enumerate(plan.units):
            self._reduced.update((unit, block) for block in range(len(planned.blocks)))

    def _is_of_first_forward(self, message: Message) -> bool:
        if message.what is What.REGATHER:
            return self._slots.is_forward(message.gate)
        freed = self._plan.units[message.unit].sharding.is_freed
        return message.what is What.GATHER and freed

    def forward(self) -> None:
        """Run the forward of the first step."""
        self._run_slots(range(self._slots.update + 1, self._slots.count))

    def cycle(self) -> Timed:
        """Run a backward, the update, and the forward of the next step."""
        self._cycle += 1
        self._waiting.extend((self._cycle, i) for i in range(len(self._plan.messages)))
        began_s = self._now_s
        ran = self._run_slots(range(self._slots.count))
        return Timed(
            self._now_s - began_s,
            tuple(Stretch(a - began_s, b - began_s) for a, b in ran),
            tuple(Stretch(a - began_s, b - began_s) for a, b in self._carried),
        )

    def _run_slots(self, slots: Iterable[int]) -> list[Stretch]:
        ran: list[Stretch] = []
        for slot in slots:
            self._arrive(2 * slot)
            while any(self._unmet[index] for index in self._dues[slot]):
                self._end_next()
            start_s = self._now_s
            self._follow(start_s + self._lengths[slot])
            ran.append(Stretch(start_s, self._now_s))
            self._arrive(2 * slot + 1)
        return ran

    def _arrive(self, moment: int) -> None:
        self._moment = moment + 2 * self._slots.count * self._cycle
        self._begin_what_may()

    def _follow(self, until_s: float) -> None:
        """Let the link work until then, which becomes now."""
        while self._link.left_s() <= until_s - self._now_s:
            self._end_next()
        self._link.work(max(until_s - self._now_s, 0.0))
        self._now_s = max(until_s, self._now_s)

    def _end_next(self) -> None:
        """Go on to the end of the next message; what ends lets others begin."""
        self._now_s += self._link.left_s()
        for index in self._link.end_next():
            self._unmet[index] -= 1
            self._carried[index] = Stretch(self._began_s.pop(index), self._now_s)
            message = self._plan.messages[index]
            if message.what is What.REDUCE:
                self._reduced.add((message.unit, message.block))
        self._begin_what_may()

    def _begin_what_may(self) -> None:
        while self._waiting:
            of, index = self._waiting[0]
            message = self._plan.messages[index]
            ready = ready_moment(self._plan, message) + 2 * self._slots.count * of
            if ready > self._moment or not self._is_made(message):
                break
            self._waiting.popleft()
            if message.what is What.REDUCE:
                self._reduced.discard((message.unit, message.block))
            self._unmet[index] += 1
            lane = (message.unit + message.block) % self._link.count
            self._link.put(lane, index, self._durations[index])
        for index in self._link.under_way():
            self._began_s.setdefault(index, self._now_s)

    def _is_made(self, message: Message) -> bool:
        """Say whether what a gather carries is up to date."""
        if message.what is not What.GATHER:
            return True
        blocks = range(len(self._plan.units[message.unit].blocks))
        needed = blocks if self._plan.whole_layers else (message.block,)
        return all((message.unit, block) in self._reduced for block in needed)


class _Lanes:
    """A link whose lanes each take one message after another, and share its rate evenly."""

    def __init__(self, count: int) -> None:
        self.count = count
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
        return min(heads) * len(heads) if heads else math.inf

    def work(self, for_s: float) -> None:
        """Carry on for less than that."""
        busy = [queue for queue in self._queues if queue]
        for queue in busy:
            queue[0][1] -= for_s / len(busy)

    def end_next(self) -> list[int]:
        """Carry on to the end of the next message; return what ends then."""
        busy = [queue for queue in self._queues if queue]
        least_s = min(queue[0][1] for queue in busy)
        ending = [queue for queue in busy if queue[0][1] <= least_s + _SAME]
        self.work(least_s * len(busy))
        return [int(queue.popleft()[0]) for queue in ending]


def _lengths(plan: Plan, profile: Profile) -> list[float]:
    slots = plan.slots
    lengths = [0.0] * slots.count
    lengths[slots.update] = profile.update_s if plan.barrier else 0.0
    for index, (unit, cost) in enumerate(zip(plan.units, profile.units, strict=True)):
        again_s = cost.forward_s if unit.checkpoint else 0.0
        lengths[slots.backward(index)] = cost.backward_s + again_s
        lengths[slots.forward(index)] = cost.forward_s
    return lengths

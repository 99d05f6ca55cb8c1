"""When everything in a plan happens: slots and messages of one steady step, on a profile.

The rules are those of the executor. A slot is entered when the one before it has run, and runs when
the messages due at it are over. The link takes messages one after another in the order of the plan,
each once its moment has come, what it carries is there, and all before it have begun.
"""

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
    """A run as far as it has come: the clocks of the computation and of the link."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan, self._slots = plan, plan.slots
        self._durations = [profile.message_s(plan, m) for m in plan.messages]
        self._lengths = _lengths(plan, profile)
        self._dues: dict[int, list[int]] = defaultdict(list)
        for index, message in enumerate(plan.messages):
            self._dues[message.due].append(index)
        self._now_s = self._free_s = 0.0
        self._cycle = -1
        self._ends: dict[int, deque[float]] = defaultdict(deque)
        self._reduced: dict[tuple[int, int], float] = defaultdict(float)
        self._carried: list[Stretch] = [Stretch(0.0, 0.0)] * len(plan.messages)
        starts = (i for i, m in enumerate(plan.messages) if self._is_of_first_forward(m))
        self._waiting: deque[tuple[int, int]] = deque((-1, index) for index in starts)

    def _is_of_first_forward(self, message: Message) -> bool:
        if message.what is What.REGATHER:
            return self._slots.is_forward(message.gate)
        freed = self._plan.units[message.unit].sharding.is_freed
        return message.what is What.GATHER and freed

    def forward(self) -> None:
        """Run the forward of the first step."""
        self._run_slots(-1, range(self._slots.update + 1, self._slots.count))

    def cycle(self) -> Timed:
        """Run a backward, the update, and the forward of the next step."""
        self._cycle += 1
        self._waiting.extend((self._cycle, i) for i in range(len(self._plan.messages)))
        began_s = self._now_s
        ran = self._run_slots(self._cycle, range(self._slots.count))
        return Timed(
            self._now_s - began_s,
            tuple(Stretch(a - began_s, b - began_s) for a, b in ran),
            tuple(Stretch(a - began_s, b - began_s) for a, b in self._carried),
        )

    def _run_slots(self, cycle: int, slots: Iterable[int]) -> list[Stretch]:
        ran: list[Stretch] = []
        for slot in slots:
            self._carry(cycle, 2 * slot)
            due = [self._ends[i].popleft() for i in self._dues[slot] if self._ends[i]]
            start_s = max([self._now_s, *due])
            self._now_s = start_s + self._lengths[slot]
            ran.append(Stretch(start_s, self._now_s))
            self._carry(cycle, 2 * slot + 1)
        return ran

    def _carry(self, cycle: int, moment: int) -> None:
        """Let the link take what has become possible at a moment, which is now."""
        while self._waiting:
            of, index = self._waiting[0]
            message = self._plan.messages[index]
            ready = ready_moment(self._plan, message) + 2 * self._slots.count * of
            if ready > moment + 2 * self._slots.count * cycle:
                return
            self._waiting.popleft()
            start_s = max(self._free_s, self._now_s, self._made_s(message))
            self._free_s = start_s + self._durations[index]
            self._carried[index] = Stretch(start_s, self._free_s)
            self._ends[index].append(self._free_s)
            if message.what is What.REDUCE:
                self._reduced[message.unit, message.block] = self._free_s

    def _made_s(self, message: Message) -> float:
        """Return when what a gather carries is up to date."""
        if message.what is not What.GATHER or self._plan.barrier:
            return 0.0
        blocks = range(len(self._plan.units[message.unit].blocks))
        needed = blocks if self._plan.whole_layers else (message.block,)
        return max(self._reduced[message.unit, block] for block in needed)


def _lengths(plan: Plan, profile: Profile) -> list[float]:
    slots = plan.slots
    lengths = [0.0] * slots.count
    lengths[slots.update] = profile.update_s if plan.barrier else 0.0
    for index, (unit, cost) in enumerate(zip(plan.units, profile.units, strict=True)):
        again_s = cost.forward_s if unit.checkpoint else 0.0
        lengths[slots.backward(index)] = cost.backward_s + again_s
        lengths[slots.forward(index)] = cost.forward_s
    return lengths

"""Windows that fit: gates as early and dues as late as a budget allows.

At first every unit comes when it is used and every gradient goes at once, which is the least that
the units' sharding needs. Then windows are widened by a slot at a time, all of them in turn, as far
as they want and there is room.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stretto.plan.building import When, build
from stretto.plan.check import window
from stretto.plan.footprint import Footprints
from stretto.plan.memory import MOMENTS, entered, left, moments
from stretto.plan.slots import Slots
from stretto.plan.value import Message, Plan, Unit, What

Key = tuple[What, int, int]
"""A message: its sort, its unit, its block. Blocks of a unit are gathered into one room: their
gates are one, that of block 0."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far windows should be wide: a number of slots for all, or a slot for each."""

    ahead: int
    """Slots before its use from which on a unit may be gathered."""
    pending: int
    """Slots that a gradient may wait after the one that follows its backward."""
    targets: Mapping[Key, int] = field(default_factory=dict)
    """By message, where it is known: the earliest gate, or the latest due."""
    first: tuple[Key, ...] = ()
    """Those whose windows are widened before all others."""


def tight_plan(units: Sequence[Unit], *, barrier: bool, whole_layers: bool) -> Plan:
    """Return the plan of ``units`` that keeps least: all comes at its use, and goes at once."""
    bare = Plan(units=tuple(units), messages=(), barrier=barrier, whole_layers=whole_layers)

    def timing(slots: Slots, what: What, unit: int, _block: int) -> When:
        _, last = window(bare, what, unit)
        if what is What.REDUCE:
            backward = slots.backward(unit)
            return When(backward, min(backward + 1, last), 2 * backward + 1)
        late = barrier and what is What.GATHER and last == slots.update + 1
        return When(last, last, max(2 * last, 2 * slots.update + 1) if late else 2 * last)

    return build(units, timing, barrier=barrier, whole_layers=whole_layers)


class Room:
    """What is left of a budget, moment by moment, while windows are widened."""

    def __init__(self, plan: Plan, footprints: Footprints, budget: int) -> None:
        self._plan, self._slots = plan, plan.slots
        self._held = footprints.holdings(plan)
        more = (num_bytes for num_bytes in footprints.activations(plan) for _ in range(MOMENTS))
        kept = zip(moments(plan, self._held), more, strict=True)
        self._free = [budget - state - other for state, other in kept]
        self.slots: dict[Key, int] = {}
        """Gates of gathers and dues of reductions, as far as they are now."""
        for message in plan.messages:
            self._note(message)
        self._sizes = {key: self._size(key) for key in self.slots}

    def _note(self, message: Message) -> None:
        key = (message.what, message.unit, message.block)
        if message.what is What.REDUCE:
            self.slots[key] = message.due
            return
        late = message.what is What.REGATHER and not self._slots.is_forward(message.gate)
        gate = message.gate + self._slots.count * late
        key = (message.what, message.unit, 0)
        self.slots[key] = min(gate, self.slots.get(key, gate))

    @property
    def least(self) -> int:
        """What is left where it is least; below zero, something is too much."""
        return min(self._free)

    def widen(self, reach: Reach) -> None:
        """Widen all windows in turn, as far as ``reach`` says and there is room."""
        favoured = [key for key in reach.first if key in self.slots]
        for moving in (favoured, list(self.slots)):
            wishes = {key: self._wished(key, reach) for key in moving}
            left = [key for key in moving if self.slots[key] != wishes[key]]
            while left:
                left = [key for key in left if self._step(key) and self.slots[key] != wishes[key]]

    def _wished(self, key: Key, reach: Reach) -> int:
        what, unit, _ = key
        first, last = window(self._plan, what, unit)
        now = self.slots[key]
        if what is What.REDUCE:
            wished = reach.targets.get(key, self._slots.backward(unit) + 1 + reach.pending)
            return max(now, min(wished, last))
        wished = reach.targets.get(key, last - reach.ahead)
        return min(now, max(wished, first))

    def _step(self, key: Key) -> bool:
        """Widen one window by a slot, if there is room."""
        now, num_bytes = self.slots[key], self._sizes[key]
        if key[0] is What.REDUCE:
            after = now + 1
            taken = range(entered(now) + 1, entered(after) + 1)
        else:
            after = now - 1
            taken = range(self._from(key[0], after), self._from(key[0], now))
        if num_bytes:
            free, count = self._free, len(self._free)
            for moment in taken:
                if free[moment % count] < num_bytes:
                    return False
            for moment in taken:
                free[moment % count] -= num_bytes
        self.slots[key] = after
        return True

    def _size(self, key: Key) -> int:
        """Return what a window takes for every moment that it is wider."""
        what, unit, block = key
        held = self._held[unit]
        if what is not What.REDUCE:
            return held.gathered
        if self._plan.barrier:
            return 0 if held.in_place else held.gradients[block]
        return held.gradients[block] + held.reduced[block]

    def _from(self, what: What, gate: int) -> int:
        waits = self._plan.barrier and what is What.GATHER
        return max(entered(gate), left(self._slots.update)) if waits else entered(gate)

    def widened(self) -> Plan:
        """Return the plan with its windows as they are now, in the order that it had."""
        return self._plan.replace(messages=tuple(map(self._moved, self._plan.messages)))

    def _moved(self, message: Message) -> Message:
        count = self._slots.count
        if message.what is What.REDUCE:
            due = self.slots[message.what, message.unit, message.block]
            return message.model_copy(update={"due": due})
        gate = self.slots[message.what, message.unit, 0]
        # In the order of its cycle a message stays on its side of the turn.
        if message.what is What.REGATHER and not self._slots.is_forward(message.gate):
            gate = max(gate, count)
        return message.model_copy(update={"gate": gate % count})


def fit(
    units: Sequence[Unit], footprints: Footprints, budget: int, reach: Reach, tight: Plan
) -> Plan | None:
    """Return the plan whose windows are as wide as ``reach`` says, where there is room.

    None if even the tightest one needs more. The order is that of the earliest beginnings.
    """
    room = Room(tight, footprints, budget)
    if room.least < 0:
        return None
    room.widen(reach)
    slots = tight.slots

    def timing(_: Slots, what: What, unit: int, block: int) -> When:
        if what is What.REDUCE:
            backward = slots.backward(unit)
            return When(backward, room.slots[what, unit, block], 2 * backward + 1)
        gate = room.slots[what, unit, 0]
        used = slots.forward(unit)
        if what is What.REGATHER:
            used = slots.count + slots.backward(unit)
            return When(gate, used, 2 * gate)
        first = max(2 * gate, 2 * slots.update + 1) if tight.barrier else 2 * gate
        return When(gate, used, first)

    return build(units, timing, barrier=tight.barrier, whole_layers=tight.whole_layers)

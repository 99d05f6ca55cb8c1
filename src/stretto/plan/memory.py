"""What a plan keeps in memory, slot by slot: model states and what travels, not activations.

Two answers. `logical_curve` is what a plan keeps when every message takes no time: exact, and equal
to the ledger of a run over a channel that takes none. `worst_curve` charges whole parameters from
the slot at which their gather may begin, and gradients until the slot that waits for them: no run
keeps more.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from stretto.comm.shards import UnitLayout
from stretto.plan.check import ready_moment
from stretto.plan.value import Message, Plan, Sharding, Unit, What


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one element."""

    parameter: int = 4
    """As it is computed with, and gathered."""
    gradient: int = 4
    """As it travels."""
    kept: int = 4
    """As it is updated."""
    state: int = 0
    """Of all that the optimizer remembers of it."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes that one rank keeps for one unit."""

    always: int
    """From the first step to the last: parameters or chunks, masters, optimizer state."""
    gathered: int
    """Whole parameters of a unit that comes and goes; else nothing."""
    inside: int
    """What of `always` lies inside them while they are there."""
    gradients: tuple[int, ...]
    """Of each block, from its unit's backward until it has been reduced."""
    reduced: tuple[int, ...]
    """Of each block's sums, where they are copied for the update; else nothing."""
    in_place: bool
    """Whether an update that waits for all gradients finds them where they were reduced."""

    def with_holes(self, share: float) -> "Holding":
        """Return it as an allocator takes it that leaves such a share of it unused."""

        def taken(num_bytes: int) -> int:
            return math.ceil(num_bytes * (1 + share))

        return Holding(
            taken(self.always),
            taken(self.gathered),
            self.inside,  # subtracted: what lies around it stays
            tuple(map(taken, self.gradients)),
            tuple(map(taken, self.reduced)),
            self.in_place,
        )


def holding(unit: Unit, layout: UnitLayout, widths: Widths, rank: int, barrier: bool) -> Holding:
    """Return what ``rank`` (of those that share the unit) keeps for ``unit``."""
    kind, recast = unit.sharding, widths.gradient != widths.kept
    whole = layout.numel * widths.parameter
    gradients = tuple(block.gradient_numel * widths.gradient for block in layout.blocks)
    if kind.is_split:
        kept, owned = layout.shard_numel, layout.owned_numel(rank)
        sums = tuple(block.chunk * widths.kept for block in layout.blocks)
    else:
        kept, owned = layout.numel, sum(layout.owned_numel(r) for r in range(layout.ranks))
        sums = tuple(block.numel * widths.kept for block in layout.blocks)
    in_place = not recast and kind in (Sharding.DP, Sharding.ZERO1)
    copied = recast or (barrier and not in_place)
    own = kept * widths.kept
    has_master = widths.kept != widths.parameter
    always = owned * widths.state + (own if kind.is_freed else whole + own * has_master)
    if kind is Sharding.ZERO1:
        always, gradients = always + sum(gradients), (0,) * len(gradients)
    nothing = (0,) * len(gradients)
    return Holding(
        always,
        whole if kind.is_freed else 0,
        own if kind.is_freed and not has_master else 0,
        gradients,
        sums if copied else nothing,
        in_place,
    )


def worst_curve(plan: Plan, holdings: Sequence[Holding]) -> list[int]:
    """Return, for each slot of a cycle, the most that a run of ``plan`` may keep in it."""
    kept = moments(plan, holdings)
    return [max(kept[first : first + MOMENTS]) for first in range(0, len(kept), MOMENTS)]


def moments(plan: Plan, holdings: Sequence[Holding]) -> list[int]:
    """Return the same for each moment of each slot."""
    count = MOMENTS * plan.slots.count
    changes = [0] * (2 * count + 1)
    for first, last, num_bytes in _charges(plan, holdings):
        changes[first] += num_bytes
        changes[last + 1] -= num_bytes
    unrolled = list(accumulate(changes))
    # What a cycle leaves behind is there beside what the next one begins with.
    always = sum(held.always for held in holdings)
    return [always + unrolled[m] + unrolled[m + count] for m in range(count)]


MOMENTS = 3
"""Of a slot: it is entered, and messages whose gate it is may begin; what is due there is over, and
it runs; what it used is gone, and messages that it has made ready may begin."""


def entered(slot: int) -> int:
    """Return the first moment of a slot."""
    return MOMENTS * slot


def runs(slot: int) -> int:
    """Return the moment at which a slot computes."""
    return MOMENTS * slot + 1


def left(slot: int) -> int:
    """Return the last moment of a slot."""
    return MOMENTS * slot + 2


def _charges(plan: Plan, holdings: Sequence[Holding]) -> Iterator[tuple[int, int, int]]:
    """Yield first and last moment, and bytes, of everything that comes and goes."""
    slots = plan.slots
    gates: dict[tuple[What, int], int] = {}
    for message in plan.messages:
        held, key = holdings[message.unit], (message.what, message.unit)
        if message.what is not What.REDUCE:
            late = message.what is What.REGATHER and not slots.is_forward(message.gate)
            gate = message.gate + slots.count if late else message.gate
            gates[key] = min(gate, gates.get(key, gate))
            continue
        backward = slots.backward(message.unit)
        waits = plan.barrier and held.in_place
        over = runs(slots.update) if waits else entered(message.due)
        # Of what is used in several places, nobody knows when the first gradient comes.
        first = 0 if plan.units[message.unit].used_often else backward
        yield runs(first), over, held.gradients[message.block]
        over = runs(slots.update) if plan.barrier else entered(message.due)
        yield left(backward), over, held.reduced[message.block]
    for (what, unit), gate in gates.items():
        used = slots.forward(unit)
        if what is What.REGATHER or plan.units[unit].sharding is Sharding.ZERO2:
            used = slots.count + slots.backward(unit)
        # Behind a barrier nothing is gathered before the update is over.
        waits = plan.barrier and what is What.GATHER
        first = max(entered(gate), left(slots.update)) if waits else entered(gate)
        yield first, runs(used), holdings[unit].gathered
        if what is What.GATHER and plan.units[unit].sharding is Sharding.ZERO2:
            yield runs(slots.forward(unit)), entered(used), -holdings[unit].inside


def logical_curve(plan: Plan, holdings: Sequence[Holding]) -> list[int]:
    """Return the most kept in each slot of a cycle when no message takes any time."""
    timeless = _Timeless(plan, holdings)
    timeless.run_forward()
    timeless.run_cycle()
    return timeless.run_cycle()


class _Timeless:
    """A run in which everything that may begin is over at once."""

    def __init__(self, plan: Plan, holdings: Sequence[Holding]) -> None:
        self._plan, self._slots = plan, plan.slots
        self._holdings = holdings
        self._live = sum(held.always for held in holdings)
        self._peaks: list[int] = []
        self._gathered: dict[int, int] = {}
        """Units that are whole, each with the number of its blocks that have been gathered."""
        self._produced: set[int] = set()
        self._updated = set(range(len(plan.units)))
        first = [m for m in plan.messages if m.what is not What.REDUCE]
        self._queue = [m for m in first if m.what is What.GATHER or self._ahead(m)]

    def run_forward(self) -> None:
        """Run the forward of the first step, before which nothing was reduced."""
        for slot in range(self._slots.update + 1, self._slots.count):
            self._run(slot)

    def run_cycle(self) -> list[int]:
        """Run a backward, the update, and the forward of the next step."""
        self._queue += self._plan.messages
        self._updated.clear()
        self._produced.clear()
        self._peaks = []
        for slot in range(self._slots.count):
            self._run(slot)
        return self._peaks

    def _run(self, slot: int) -> None:
        slots, plan = self._slots, self._plan
        self._peaks.append(self._live)
        self._pump(2 * slot)
        if slot < slots.update:
            unit = slots.units - 1 - slot
            self._take(sum(self._holdings[unit].gradients))
            self._let_go(unit)
            self._produced.add(unit)
        elif slot == slots.update:
            self._update_all()
        elif plan.units[slot - slots.units - 1].sharding is Sharding.ZERO3:
            self._let_go(slot - slots.units - 1)
        self._pump(2 * slot + 1)

    def _update_all(self) -> None:
        if not self._plan.barrier:
            return
        for held in self._holdings:
            self._live -= sum(held.reduced) + (sum(held.gradients) if held.in_place else 0)
        self._updated = set(range(len(self._plan.units)))

    def _take(self, num_bytes: int) -> None:
        self._live += num_bytes
        self._peaks[-1] = max(self._peaks[-1], self._live)

    def _let_go(self, unit: int) -> None:
        num_gathered = self._gathered.pop(unit, 0)
        if not num_gathered:
            return
        if num_gathered == len(self._plan.units[unit].blocks):
            self._take(self._holdings[unit].inside)
        self._live -= self._holdings[unit].gathered

    def _ahead(self, message: Message) -> bool:
        return self._slots.is_forward(message.gate)

    def _pump(self, moment: int) -> None:
        while self._queue and self._may_begin(self._queue[0], moment):
            self._begin(self._queue.pop(0))

    def _may_begin(self, message: Message, moment: int) -> bool:
        if ready_moment(self._plan, message) > moment:
            return False
        if message.what is What.REDUCE:
            return message.unit in self._produced
        return message.what is What.REGATHER or message.unit in self._updated

    def _begin(self, message: Message) -> None:
        unit = message.unit
        held = self._holdings[unit]
        if message.what is not What.REDUCE:
            self._take(0 if unit in self._gathered else held.gathered)
            self._gathered[unit] = self._gathered.get(unit, 0) + 1
            if self._gathered[unit] == len(self._plan.units[unit].blocks):
                self._live -= held.inside
            return
        self._take(held.reduced[message.block])
        if self._plan.barrier:
            self._live -= 0 if held.in_place else held.gradients[message.block]
        else:
            self._live -= held.gradients[message.block] + held.reduced[message.block]
            self._updated.add(unit)

"""Computes the time of a step of a plan with a constraint graph, without a simulation.

Nodes are the starts of slots and of messages. An arc says that one node comes at least a number of
quanta after another, in the same cycle or the one before. A period is long enough if no cycle of
the graph takes longer than the periods that it spans. The shortest such period is the time of a
step.
This verifies `stretto.planner.exact_timing` independently, for one lane and no slowdown.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from stretto.planner.check import ready_half_slot
from stretto.planner.plan import MessageKind, Plan
from stretto.planner.profile import Profile
from tests.exact.instances import QUANTUM_S


class Arc(NamedTuple):
    """``later`` starts at least ``quanta`` after the start of ``sooner``."""

    sooner: int
    later: int
    quanta: int
    cycles: int
    """Number of cycles by which ``sooner`` is before ``later``."""


class Graph:
    """The arcs that all orders of a plan's messages share."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan, self._count = plan, plan.slots.count
        checkpoints = [unit.checkpoint for unit in plan.units]
        lengths_s = profile.slot_seconds(checkpoints, barrier=plan.barrier)
        self._lengths = [quanta(length_s) for length_s in lengths_s]
        self.taken = [quanta(profile.message_s(plan, m)) for m in plan.messages]
        self._fixed = [*self._of_slots(), *self._of_messages()]

    def can_repeat(self, period: int, order: Sequence[int]) -> bool:
        """Return whether the plan can repeat every ``period`` quanta if its messages begin so.

        The messages of ``order`` come first, in this order; the others follow in any order. The
        answer is exact if there are no others. Otherwise the others are relaxed: False holds for
        every order that begins so, True may be wrong.
        """
        others = [i for i in range(len(self.taken)) if i not in order]
        if period < max(sum(self.taken), sum(self._lengths)):
            return False
        arcs = [*self._fixed, *self._of_order(order, others)]
        weighed = [(a.sooner, a.later, a.quanta - a.cycles * period) for a in arcs]
        begins = [0] * (self._count + len(self.taken))
        for _ in range(len(begins) + 1):
            moved = False
            for sooner, later, least in weighed:
                if begins[sooner] + least > begins[later]:
                    begins[later], moved = begins[sooner] + least, True
            if not moved:
                return True
        return False

    def least_period(self, order: Sequence[int]) -> int:
        """Return the time of a step in quanta, with the messages in this order."""
        low, high = 0, sum(self._lengths) + sum(self.taken)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.can_repeat(middle, order) else (middle + 1, high)
        return low

    def _of_slots(self) -> Iterator[Arc]:
        for slot, length in enumerate(self._lengths):
            yield Arc(slot, (slot + 1) % self._count, length, slot + 1 == self._count)

    def _of_messages(self) -> Iterator[Arc]:
        plan, slots = self._plan, self._plan.slots
        for index, message in enumerate(plan.messages):
            node = self._count + index
            # A plan counts half slots: the end of slot t is the start of slot t + 1.
            after = (ready_half_slot(plan, message) - 1) // 2
            yield Arc(after % self._count, node, self._lengths[after], after < 0)
            ahead = message.what is MessageKind.UNSHARD_FOR_BACKWARD and slots.is_forward(
                message.gate
            )
            yield Arc(node, message.due, self.taken[index], ahead)
            if message.what is MessageKind.UNSHARD:
                keys = [(m.what, m.unit, m.block) for m in plan.messages]
                reduction = keys.index((MessageKind.REDUCE, message.unit, message.block))
                yield Arc(self._count + reduction, node, self.taken[reduction], 0)

    def _of_order(self, order: Sequence[int], others: Sequence[int]) -> Iterator[Arc]:
        count, taken = self._count, self.taken
        for before, after in pairwise(order):
            yield Arc(count + before, count + after, taken[before], 0)
        if not order:
            pairs = [(i, j) for i in others for j in others if i != j]
            yield from (Arc(count + i, count + j, taken[i], 1) for i, j in pairs)
            return
        first, last = order[0], order[-1]
        rest = sum(taken[index] for index in others)
        yield Arc(count + last, count + first, taken[last] + rest, 1)
        for index in others:
            yield Arc(count + last, count + index, taken[last], 0)
            yield Arc(count + index, count + first, taken[index], 1)


def steady_quanta(plan: Plan, profile: Profile) -> int:
    """Return the time of a step of ``plan`` in the steady state, in quanta."""
    return Graph(plan, profile).least_period(range(len(plan.messages)))


def quanta(seconds: float) -> int:
    """Return a time in quanta; it must be a whole number of them."""
    number = round(seconds / QUANTUM_S)
    assert abs(number - seconds / QUANTUM_S) < 1e-6, f"{seconds} s is no multiple of a quantum"
    return number

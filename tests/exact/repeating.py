"""Whether a plan can repeat every so many quanta: a graph of what comes after what.

Nodes are the starts of slots and of messages. An arc says that one comes so many quanta after
another, of the same cycle or of the one before. A period is long enough if no circle of arcs takes
longer than the periods it spans; the least such period is what a step takes. Nothing is simulated:
this is a second opinion about `stretto.plan.clock`, for one lane and no slowdown.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from stretto.plan.check import ready_moment
from stretto.plan.profile import Profile
from stretto.plan.value import Plan, What
from tests.exact.instances import QUANTUM_S


class Arc(NamedTuple):
    """``later`` begins not before so many quanta after ``sooner`` has begun."""

    sooner: int
    later: int
    quanta: int
    cycles: int
    """Of how many cycles before ``later`` is ``sooner``."""


class Graph:
    """The arcs of plans that differ in the order of their messages."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan, self._count = plan, plan.slots.count
        checkpoints = [unit.checkpoint for unit in plan.units]
        lengths_s = profile.lengths(checkpoints, barrier=plan.barrier)
        self._lengths = [quanta(length_s) for length_s in lengths_s]
        self.taken = [quanta(profile.message_s(plan, m)) for m in plan.messages]
        self._fixed = [*self._of_slots(), *self._of_messages()]

    def can_repeat(self, period: int, order: Sequence[int]) -> bool:
        """Say whether a cycle may take ``period`` with these messages first, in this order.

        The others come behind them in any order. The answer is exact if there are none. Else it
        takes them to be carried all at once, and one after another in all: a no is a no for every
        order that begins so.
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
        """Return what a step takes."""
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
            # The end of slot t, which is when the next one is entered, is two of a plan's moments.
            after = (ready_moment(plan, message) - 1) // 2
            yield Arc(after % self._count, node, self._lengths[after], after < 0)
            ahead = message.what is What.REGATHER and slots.is_forward(message.gate)
            yield Arc(node, message.due, self.taken[index], ahead)
            if message.what is What.GATHER:
                keys = [(m.what, m.unit, m.block) for m in plan.messages]
                reduction = keys.index((What.REDUCE, message.unit, message.block))
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
    """Return what a step of ``plan`` takes once steps are alike."""
    return Graph(plan, profile).least_period(range(len(plan.messages)))


def quanta(seconds: float) -> int:
    """Return a time as a whole number of quanta, which it must be."""
    number = round(seconds / QUANTUM_S)
    assert abs(number - seconds / QUANTUM_S) < 1e-6, f"{seconds} s is no multiple of a quantum"
    return number

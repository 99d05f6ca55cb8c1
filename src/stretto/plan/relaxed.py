"""The planner's problem as a mixed-integer linear one, in which messages are fluid.

Each unit takes one of its options. Messages flow in the intervals of a cycle: one for each group of
neighbours backward, the update, and one for each group forward; an interval is the wait before a
slot and the slot. With groups of one unit this is the problem itself, but for two things: a message
may be carried in parts at any time, and a unit that is gathered in part takes memory in part. With
larger groups every window is rounded outwards, and memory looked at only where its group has most.
So whatever can be carried out is a solution of this, and its optimum is a bound.

Variables: the options (0 or 1); how long computation waits before each interval; and for each group
and sort of message how many seconds of it have been carried by the end of each interval.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stretto.plan.options import Allowed, Option
from stretto.plan.profile import Profile
from stretto.plan.slots import Slots
from stretto.plan.value import Sharding

_TIE = 1e-4
"""What share of the computation all preferences among equals may weigh."""


class Flow(Enum):
    """A sort of message, as far as memory knows the difference."""

    REDUCE = "reduce"
    COME = "gather"
    """Into room that is taken for it."""
    REFRESH = "refresh"
    """Into parameters that are there."""
    AGAIN = "regather"


@dataclass(slots=True)
class Rows:
    """Rows of a sparse matrix with their bounds."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> int:
        """Add ``lower <= sum of value * column <= upper``; return its number."""
        row = len(self.lower)
        for column, value in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)
        self.lower.append(lower)
        self.upper.append(upper)
        return row


@dataclass(frozen=True, slots=True)
class Problem:
    """Minimise ``cost @ x``, with some of x whole numbers."""

    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    whole: NDArray[np.float64]
    rows: Rows
    memory_rows: tuple[int, ...]
    """By interval."""
    base_s: float
    """What a step takes besides the cost."""
    slack_s: float
    """How much the preferences among equals can make of the cost."""


class Relaxation:
    """The problem of one profile and budget, and the way back from its solution."""

    def __init__(
        self,
        profile: Profile,
        options: Sequence[tuple[Option, ...]],
        groups: Sequence[range],
        allowed: Allowed,
    ) -> None:
        self._profile, self._options, self.groups = profile, options, list(groups)
        self._barrier = allowed.barrier
        self.slots = Slots(len(self.groups))
        """Of groups, not of units."""
        self._count = 0
        self._choice = [[self._column() for _ in mine] for mine in options]
        self._wait = [self._column() for _ in range(self.slots.count)]
        self._carried: dict[tuple[Flow, int], dict[int, int]] = {}
        for group in range(len(self.groups)):
            for flow in Flow:
                if self._total(flow, group):
                    first, last = self._window(flow, group)
                    self._carried[flow, group] = {t: self._column() for t in range(first, last + 1)}
        lengths = profile.lengths([False] * len(options), barrier=allowed.barrier)
        self._unit_slots = Slots(len(options))
        self._lengths = [
            sum(lengths[slot] for slot in self._slots_in(interval))
            for interval in range(self.slots.count)
        ]
        self._slot_lengths = lengths

    def _column(self) -> int:
        self._count += 1
        return self._count - 1

    def _slots_in(self, interval: int) -> list[int]:
        """Return the slots of units that an interval of groups is, in order."""
        slots, groups = self.slots, self.groups
        if interval == slots.update:
            return [self._unit_slots.update]
        if interval < slots.update:
            return [
                self._unit_slots.backward(u) for u in reversed(groups[slots.units - 1 - interval])
            ]
        return [self._unit_slots.forward(u) for u in groups[interval - slots.units - 1]]

    def _window(self, flow: Flow, group: int) -> tuple[int, int]:
        """Return the first and last interval in which a group's messages may travel.

        Those of a regather may be in the next cycle.
        """
        slots, several = self.slots, len(self.groups[group]) > 1
        backward, forward = slots.backward(group), slots.forward(group)
        if flow is Flow.AGAIN:
            return forward + (not several), slots.count + backward
        if flow is Flow.REDUCE:
            return backward + (not several), slots.update if self._barrier else forward
        return slots.update + 1 if self._barrier else backward + (not several), forward

    def _seconds(self, flow: Flow, option: Option) -> float:
        if flow is Flow.REDUCE:
            return option.reduce_s
        if flow is Flow.AGAIN:
            return option.regather_s
        comes = option.choice.sharding.is_freed
        return option.gather_s if comes == (flow is Flow.COME) else 0.0

    def _total(self, flow: Flow, group: int) -> list[tuple[int, float]]:
        """Return the seconds of a group's messages, as terms of its options."""
        return [
            (column, seconds)
            for unit in self.groups[group]
            for column, option in zip(self._choice[unit], self._options[unit], strict=True)
            if (seconds := self._seconds(flow, option))
        ]

    def _by(self, flow: Flow, group: int, interval: int) -> list[tuple[int, float]]:
        """Return what has been carried by the end of an interval, as terms."""
        columns = self._carried.get((flow, group), {})
        if not columns or interval < min(columns):
            return []
        return [(columns[min(interval, max(columns))], 1.0)]

    def _during(self, flow: Flow, group: int, interval: int) -> list[tuple[int, float]]:
        before = self._by(flow, group, interval - 1)
        return self._by(flow, group, interval) + [(column, -1.0) for column, _ in before]

    def problem(self, budget: int) -> Problem:
        """Return the problem of staying within ``budget`` bytes."""
        rows = Rows()
        for columns in self._choice:
            rows.add([(column, 1.0) for column in columns], 1, 1)
        self._carry_all(rows)
        for interval in range(self.slots.count):
            self._share_the_link(rows, interval)
        if not self._barrier:
            self._update_first(rows)
        memory = [self._keep_within(rows, interval, budget) for interval in range(self.slots.count)]
        cost, slack_s = self._cost()
        whole = np.zeros(self._count)
        upper = np.full(self._count, np.inf)
        for columns in self._choice:
            whole[columns] = upper[columns] = 1
        return Problem(cost, upper, whole, rows, tuple(memory), sum(self._lengths), slack_s)

    def _carry_all(self, rows: Rows) -> None:
        """See that all is carried by the end of its window, and nothing taken back."""
        for (flow, group), columns in self._carried.items():
            ordered = list(columns.values())
            for before, after in pairwise(ordered):
                rows.add([(after, 1.0), (before, -1.0)], 0, np.inf)
            terms = [(column, -seconds) for column, seconds in self._total(flow, group)]
            rows.add([(ordered[-1], 1.0), *terms], 0, 0)

    def _share_the_link(self, rows: Rows, interval: int) -> None:
        """See that no interval carries more than it has time for, nor anything too late."""
        slots, slowdown = self.slots, self._profile.slowdown
        lengths = [self._slot_lengths[slot] for slot in self._slots_in(interval)]
        carried: list[tuple[int, float]] = []
        due: list[tuple[int, float]] = []
        new: list[tuple[int, float]] = []
        for (flow, group), columns in self._carried.items():
            for at in (interval, interval + slots.count):
                if at in columns:
                    terms = self._during(flow, group, at)
                    carried += terms
                    due += terms if at == max(columns) else []
                    begins = slots.forward if flow is Flow.AGAIN else slots.backward
                    new += terms if at == begins(group) else []
        wait = (self._wait[interval], -1.0)
        again = [(column, -slowdown * s) for column, s in self._computed_again(interval)]
        rows.add([*carried, wait, *again], -np.inf, slowdown * sum(lengths))
        if due:  # over when the last slot of the interval runs
            rows.add([*due, wait, *again], -np.inf, slowdown * sum(lengths[:-1]))
        if new:  # not there before the first one has run
            rows.add([*new, wait, *again], -np.inf, slowdown * sum(lengths[1:]))

    def _computed_again(self, interval: int) -> list[tuple[int, float]]:
        if interval >= self.slots.update:
            return []
        group = self.groups[self.slots.units - 1 - interval]
        return [
            (column, option.again_s)
            for unit in group
            for column, option in zip(self._choice[unit], self._options[unit], strict=True)
            if option.again_s
        ]

    def _update_first(self, rows: Rows) -> None:
        """See that no part of a group is gathered before it has been reduced."""
        for group, units in enumerate(self.groups):
            ratios = [
                option.gather_s / option.reduce_s
                for unit in units
                for option in self._options[unit]
                if option.reduce_s
            ]
            first, last = self._window(Flow.COME, group)
            for interval in range(first, last) if ratios else ():
                gathered = self._by(Flow.COME, group, interval)
                gathered += self._by(Flow.REFRESH, group, interval)
                reduced = self._by(Flow.REDUCE, group, interval)
                terms = [(column, -1.0) for column, _ in gathered]
                rows.add([*terms, *((column, max(ratios)) for column, _ in reduced)], 0, np.inf)

    def _keep_within(self, rows: Rows, interval: int, budget: int) -> int:
        """See to memory where an interval has most: in the slot of its group's last unit."""
        terms: dict[int, float] = {}
        for column, num_bytes in self._kept(interval):
            terms[column] = terms.get(column, 0.0) + num_bytes / budget
        fixed = self._profile.other_bytes
        return rows.add(list(terms.items()), -np.inf, 1 - fixed / budget)

    def _kept(self, interval: int) -> Iterator[tuple[int, float]]:
        slots = self.slots
        here = None
        if interval != slots.update:
            backward = interval < slots.update
            here = slots.units - 1 - interval if backward else interval - slots.units - 1
        last = self.groups[here][-1] if here is not None else -1
        for unit, mine in enumerate(self._options):
            for column, option in zip(self._choice[unit], mine, strict=True):
                num_bytes = option.held.always + _standing(option, unit, last, interval, slots)
                yield column, float(num_bytes)
        for group in range(len(self.groups)):
            yield from self._ahead(group, interval)
            yield from self._pending(group, interval, last)

    def _ahead(self, group: int, interval: int) -> Iterator[tuple[int, float]]:
        """Yield what has been gathered before its use."""
        slots = self.slots
        several = len(self._slots_in(interval)) > 1 and interval < slots.update
        for flow in (Flow.COME, Flow.AGAIN):
            used = (
                slots.forward(group) if flow is Flow.COME else slots.count + slots.backward(group)
            )
            at = interval
            if flow is Flow.AGAIN and interval <= slots.forward(group):
                at = interval + slots.count
            rates = [
                option.held.gathered / seconds
                for unit in self.groups[group]
                for option in self._options[unit]
                if (seconds := self._seconds(flow, option))
            ]
            if at < used and rates:
                # In a backward of several, what begins now may do so after the slot looked at.
                for column, _ in self._by(flow, group, at - several):
                    yield column, min(rates)

    def _pending(self, group: int, interval: int, last: int) -> Iterator[tuple[int, float]]:
        """Yield gradients: those made now, and those that have not been reduced."""
        slots = self.slots
        began, over = slots.backward(group), self._window(Flow.REDUCE, group)[1]
        rates = [0.0]
        for unit in self.groups[group]:
            for column, option in zip(self._choice[unit], self._options[unit], strict=True):
                stays = self._barrier and option.held.in_place
                early = self._profile.units[unit].used_often and interval <= began
                made = early or (unit == last and interval == began)
                waits = option.reduce_s > 0 and began < interval <= over
                if made or waits or (stays and began < interval <= slots.update):
                    yield column, float(option.gradient_bytes)
                if self._barrier and began < interval <= slots.update:
                    yield column, float(sum(option.held.reduced))
                if option.reduce_s and not stays:
                    rates.append(option.gradient_bytes / option.reduce_s)
        if began < interval <= over:
            for column, _ in self._by(Flow.REDUCE, group, interval):
                yield column, -max(rates)

    def _cost(self) -> tuple[NDArray[np.float64], float]:
        """Return what is to be made small, and what preferences among equals may weigh in it.

        While messages travel computation is slower: a second carried beside it costs a share.
        """
        lost = 1 - 1 / self._profile.slowdown
        cost = np.zeros(self._count)
        cost[self._wait] = 1 - lost
        slack_s = _TIE * sum(self._lengths)
        most_s = sum(max(o.channel_s for o in mine) for mine in self._options)
        most_bytes = sum(max(o.held.always for o in mine) for mine in self._options)
        for unit, (mine, columns) in enumerate(zip(self._options, self._choice, strict=True)):
            for column, option in zip(columns, mine, strict=True):
                cost[column] += option.again_s + lost * option.channel_s
                # Whoever may keep less, or send less, should; early units rather than late ones
                # are gathered twice: they are kept longer.
                late_s = option.regather_s * unit / len(self._options)
                share = option.held.always / most_bytes
                share += (option.channel_s + late_s) / max(most_s, 1e-12)
                cost[column] += slack_s * share / 6
        # Gathers as late as can be, reductions as soon.
        tie = slack_s / max(2 * most_s * (self.slots.count + 1), 1e-12)
        for (flow, _), carried in self._carried.items():
            cost[list(carried.values())] += -tie if flow is Flow.REDUCE else tie
        return cost, slack_s

    @property
    def num_slots(self) -> int:
        """Slots of units in a cycle."""
        return self._unit_slots.count

    def fullest_slot(self, interval: int) -> int:
        """Return the slot of an interval at which memory is looked at: its group's last unit's."""
        mine = self._slots_in(interval)
        return mine[0] if interval < self.slots.update else mine[-1]

    def first_slot(self, interval: int) -> int:
        """Return the first slot of units in an interval, which may be in the next cycle."""
        cycle, interval = divmod(interval, self.slots.count)
        return self._slots_in(interval)[0] + cycle * self._unit_slots.count

    def last_slot(self, interval: int) -> int:
        """Return the last slot of units in an interval, which may be in the next cycle."""
        cycle, interval = divmod(interval, self.slots.count)
        return self._slots_in(interval)[-1] + cycle * self._unit_slots.count

    def chosen(self, x: NDArray[np.float64]) -> list[Option]:
        """Return the option of each unit that a solution has most of."""
        pairs = zip(self._options, self._choice, strict=True)
        return [mine[int(np.argmax(x[columns]))] for mine, columns in pairs]

    def flow(self, x: NDArray[np.float64], flow: Flow, group: int) -> dict[int, float]:
        """Return the share of a group's messages that a solution has carried by each interval."""
        columns = self._carried.get((flow, group), {})
        total = x[max(columns.values())] if columns else 0.0
        return (
            {t: float(x[column] / total) for t, column in columns.items()} if total > 1e-9 else {}
        )


def _standing(option: Option, unit: int, last: int, interval: int, slots: Slots) -> int:
    """Return the bytes of a unit that a choice keeps while unit ``last`` runs, whatever travels."""
    if unit > last:
        return 0
    kept = option.kept_bytes
    if unit == last:
        return kept + option.running_bytes + option.held.gathered - _inside(option, interval, slots)
    if option.choice.sharding is Sharding.ZERO2:
        return kept + option.held.gathered - option.held.inside
    return kept


def _inside(option: Option, interval: int, slots: Slots) -> int:
    """Return what of a rank's own lies in whole parameters, of the unit that runs."""
    stays = option.choice.sharding is Sharding.ZERO2 and interval > slots.update
    return option.held.inside if stays else 0

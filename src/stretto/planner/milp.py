"""The planning problem as a mixed-integer linear program (MILP) whose optimum bounds every plan.

Each unit takes exactly one of its options. The cycle is divided into intervals: one for the
backward of each group of neighbouring units, one for the update, one for the forward of each group.
An interval covers a slot and the wait before it. Messages are modelled as flows over intervals.

Every plan that can be executed is a solution of this program, because it only relaxes the problem:

- A message may be sent in parts, at any time. A partly gathered unit takes part of its memory.
- With groups of several units, every window is rounded outwards, and memory is limited only in the
  slot of an interval in which its group keeps most.

Variables: the options (0 or 1), the seconds that computation waits before each interval, and for
each group and kind of message the seconds of it that were sent by the end of each interval.
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stretto.planner.plan import Sharding, Slots
from stretto.planner.profile import Profile
from stretto.planner.solver import ConstraintRows, MilpProblem
from stretto.planner.unit_choices import PlanConstraints, UnitOption

_TIE_BREAK_SHARE = 1e-4
"""Upper limit of all tie-breaking costs together, as a share of the computation time."""


class FlowKind(Enum):
    """The kinds of message that differ in the memory that they take."""

    REDUCE = "reduce"
    UNSHARD = "unshard"
    """An unshard that allocates memory for whole parameters."""
    REFRESH = "refresh"
    """An unshard that writes into parameters that are always allocated."""
    UNSHARD_FOR_BACKWARD = "unshard for backward"


class MilpModel:
    """The MILP of one profile, which also translates its solutions back into options and slots."""

    def __init__(
        self,
        profile: Profile,
        options: Sequence[tuple[UnitOption, ...]],
        groups: Sequence[range],
        constraints: PlanConstraints,
    ) -> None:
        self._profile, self._options, self.groups = profile, options, list(groups)
        self._barrier = constraints.barrier
        self.slots = Slots(len(self.groups))
        """The cycle counted in groups, not in units."""
        self._num_columns = 0
        self._choice_columns = [
            [self._new_column() for _ in unit_options] for unit_options in options
        ]
        self._wait_columns = [self._new_column() for _ in range(self.slots.count)]
        self._sent_columns: dict[tuple[FlowKind, int], dict[int, int]] = {}
        for group in range(len(self.groups)):
            for flow in FlowKind:
                if self._group_flow_terms(flow, group):
                    first, last = self._window(flow, group)
                    self._sent_columns[flow, group] = {
                        t: self._new_column() for t in range(first, last + 1)
                    }
        slot_seconds = profile.slot_seconds([False] * len(options), barrier=constraints.barrier)
        self._unit_slots = Slots(len(options))
        self._interval_seconds = [
            sum(slot_seconds[slot] for slot in self._slots_in(interval))
            for interval in range(self.slots.count)
        ]
        self._slot_seconds = slot_seconds

    def _new_column(self) -> int:
        self._num_columns += 1
        return self._num_columns - 1

    def _slots_in(self, interval: int) -> list[int]:
        """Return the unit slots that make up an interval, in order."""
        slots, groups = self.slots, self.groups
        if interval == slots.update:
            return [self._unit_slots.update]
        if interval < slots.update:
            return [
                self._unit_slots.backward(u) for u in reversed(groups[slots.units - 1 - interval])
            ]
        return [self._unit_slots.forward(u) for u in groups[interval - slots.units - 1]]

    def _window(self, flow: FlowKind, group: int) -> tuple[int, int]:
        """Return the first and last interval in which a group's messages may be sent.

        An unshard for backward may be sent in the next cycle, so its intervals may exceed the
        count.
        """
        slots, has_several = self.slots, len(self.groups[group]) > 1
        backward, forward = slots.backward(group), slots.forward(group)
        if flow is FlowKind.UNSHARD_FOR_BACKWARD:
            return forward + (not has_several), slots.count + backward
        if flow is FlowKind.REDUCE:
            return backward + (not has_several), slots.update if self._barrier else forward
        return slots.update + 1 if self._barrier else backward + (not has_several), forward

    def _flow_seconds(self, flow: FlowKind, option: UnitOption) -> float:
        if flow is FlowKind.REDUCE:
            return option.reduce_s
        if flow is FlowKind.UNSHARD_FOR_BACKWARD:
            return option.unshard_for_backward_s
        into_new_memory = option.choice.sharding.shards_parameters
        return option.unshard_s if into_new_memory == (flow is FlowKind.UNSHARD) else 0.0

    def _group_flow_terms(self, flow: FlowKind, group: int) -> list[tuple[int, float]]:
        """Return the link seconds of a group's messages as terms of its options' columns."""
        return [
            (column, seconds)
            for unit in self.groups[group]
            for column, option in zip(self._choice_columns[unit], self._options[unit], strict=True)
            if (seconds := self._flow_seconds(flow, option))
        ]

    def _sent_by(self, flow: FlowKind, group: int, interval: int) -> list[tuple[int, float]]:
        """Return the terms for the seconds sent by the end of an interval."""
        columns = self._sent_columns.get((flow, group), {})
        if not columns or interval < min(columns):
            return []
        return [(columns[min(interval, max(columns))], 1.0)]

    def _sent_during(self, flow: FlowKind, group: int, interval: int) -> list[tuple[int, float]]:
        before = self._sent_by(flow, group, interval - 1)
        return self._sent_by(flow, group, interval) + [(column, -1.0) for column, _ in before]

    def problem(self, memory_limit: int) -> MilpProblem:
        """Return the MILP for a limit of ``memory_limit`` bytes on each rank."""
        rows = ConstraintRows()
        for columns in self._choice_columns:
            rows.add([(column, 1.0) for column in columns], 1, 1)
        self._require_all_sent(rows)
        for interval in range(self.slots.count):
            self._limit_link(rows, interval)
        if not self._barrier:
            self._require_reduce_before_unshard(rows)
        memory = [
            self._limit_memory(rows, interval, memory_limit) for interval in range(self.slots.count)
        ]
        cost, slack_s = self._objective()
        integral = np.zeros(self._num_columns)
        upper = np.full(self._num_columns, np.inf)
        for columns in self._choice_columns:
            integral[columns] = upper[columns] = 1
        return MilpProblem(
            cost, upper, integral, rows, tuple(memory), sum(self._interval_seconds), slack_s
        )

    def _require_all_sent(self, rows: ConstraintRows) -> None:
        """Require that each flow never decreases and is complete by the end of its window."""
        for (flow, group), columns in self._sent_columns.items():
            ordered = list(columns.values())
            for before, after in pairwise(ordered):
                rows.add([(after, 1.0), (before, -1.0)], 0, np.inf)
            terms = [(column, -seconds) for column, seconds in self._group_flow_terms(flow, group)]
            rows.add([(ordered[-1], 1.0), *terms], 0, 0)

    def _limit_link(self, rows: ConstraintRows, interval: int) -> None:
        """Require that each interval is long enough for the messages that are sent in it."""
        slots, slowdown = self.slots, self._profile.slowdown
        slot_seconds = [self._slot_seconds[slot] for slot in self._slots_in(interval)]
        sent_terms: list[tuple[int, float]] = []
        due_terms: list[tuple[int, float]] = []
        new_terms: list[tuple[int, float]] = []
        for (flow, group), columns in self._sent_columns.items():
            for at in (interval, interval + slots.count):
                if at in columns:
                    terms = self._sent_during(flow, group, at)
                    sent_terms += terms
                    due_terms += terms if at == max(columns) else []
                    producing_slot = (
                        slots.forward if flow is FlowKind.UNSHARD_FOR_BACKWARD else slots.backward
                    )
                    new_terms += terms if at == producing_slot(group) else []
        wait = (self._wait_columns[interval], -1.0)
        recompute_terms = [(column, -slowdown * s) for column, s in self._recompute_terms(interval)]
        rows.add([*sent_terms, wait, *recompute_terms], -np.inf, slowdown * sum(slot_seconds))
        if due_terms:  # these must be complete before the interval's last slot runs
            rows.add(
                [*due_terms, wait, *recompute_terms], -np.inf, slowdown * sum(slot_seconds[:-1])
            )
        if new_terms:  # these cannot start before the interval's first slot has run
            rows.add(
                [*new_terms, wait, *recompute_terms], -np.inf, slowdown * sum(slot_seconds[1:])
            )

    def _recompute_terms(self, interval: int) -> list[tuple[int, float]]:
        if interval >= self.slots.update:
            return []
        group = self.groups[self.slots.units - 1 - interval]
        return [
            (column, option.recompute_s)
            for unit in group
            for column, option in zip(self._choice_columns[unit], self._options[unit], strict=True)
            if option.recompute_s
        ]

    def _require_reduce_before_unshard(self, rows: ConstraintRows) -> None:
        """Require that no part of a group is unsharded before its gradients were reduced."""
        for group, units in enumerate(self.groups):
            ratios = [
                option.unshard_s / option.reduce_s
                for unit in units
                for option in self._options[unit]
                if option.reduce_s
            ]
            first, last = self._window(FlowKind.UNSHARD, group)
            for interval in range(first, last) if ratios else ():
                unsharded = self._sent_by(FlowKind.UNSHARD, group, interval)
                unsharded += self._sent_by(FlowKind.REFRESH, group, interval)
                reduced_gradients = self._sent_by(FlowKind.REDUCE, group, interval)
                terms = [(column, -1.0) for column, _ in unsharded]
                rows.add(
                    [*terms, *((column, max(ratios)) for column, _ in reduced_gradients)], 0, np.inf
                )

    def _limit_memory(self, rows: ConstraintRows, interval: int, memory_limit: int) -> int:
        """Limit the memory of an interval in the slot of its group's last unit, where it peaks.

        Returns the number of the row.
        """
        terms: dict[int, float] = {}
        for column, num_bytes in self._memory_terms(interval):
            terms[column] = terms.get(column, 0.0) + num_bytes / memory_limit
        fixed = self._profile.other_bytes
        return rows.add(list(terms.items()), -np.inf, 1 - fixed / memory_limit)

    def _memory_terms(self, interval: int) -> Iterator[tuple[int, float]]:
        slots = self.slots
        running_group = None
        if interval != slots.update:
            backward = interval < slots.update
            running_group = slots.units - 1 - interval if backward else interval - slots.units - 1
        last = self.groups[running_group][-1] if running_group is not None else -1
        for unit, unit_options in enumerate(self._options):
            for column, option in zip(self._choice_columns[unit], unit_options, strict=True):
                num_bytes = option.unit_memory.persistent + _resident_bytes(
                    option, unit, last, interval, slots
                )
                yield column, float(num_bytes)
        for group in range(len(self.groups)):
            yield from self._prefetched_terms(group, interval)
            yield from self._gradient_terms(group, interval, last)

    def _prefetched_terms(self, group: int, interval: int) -> Iterator[tuple[int, float]]:
        """Yield the bytes of parameters that were unsharded before their use."""
        slots = self.slots
        has_several = len(self._slots_in(interval)) > 1 and interval < slots.update
        for flow in (FlowKind.UNSHARD, FlowKind.UNSHARD_FOR_BACKWARD):
            used = (
                slots.forward(group)
                if flow is FlowKind.UNSHARD
                else slots.count + slots.backward(group)
            )
            at = interval
            if flow is FlowKind.UNSHARD_FOR_BACKWARD and interval <= slots.forward(group):
                at = interval + slots.count
            rates = [
                option.unit_memory.unsharded / seconds
                for unit in self.groups[group]
                for option in self._options[unit]
                if (seconds := self._flow_seconds(flow, option))
            ]
            if at < used and rates:
                # In the backward of a group of several units, a message that starts in this
                # interval may start after the slot in which memory is limited. It does not count
                # yet.
                for column, _ in self._sent_by(flow, group, at - has_several):
                    yield column, min(rates)

    def _gradient_terms(self, group: int, interval: int, last: int) -> Iterator[tuple[int, float]]:
        """Yield the bytes of gradients that are produced now or not reduced yet."""
        slots = self.slots
        began, over = slots.backward(group), self._window(FlowKind.REDUCE, group)[1]
        rates = [0.0]
        for unit in self.groups[group]:
            for column, option in zip(self._choice_columns[unit], self._options[unit], strict=True):
                stays_for_update = self._barrier and option.unit_memory.updates_in_place
                may_be_early = self._profile.units[unit].used_often and interval <= began
                is_produced = may_be_early or (unit == last and interval == began)
                waits = option.reduce_s > 0 and began < interval <= over
                if is_produced or waits or (stays_for_update and began < interval <= slots.update):
                    yield column, float(option.gradient_bytes)
                if self._barrier and began < interval <= slots.update:
                    yield column, float(sum(option.unit_memory.reduced_gradients))
                if option.reduce_s and not stays_for_update:
                    rates.append(option.gradient_bytes / option.reduce_s)
        if began < interval <= over:
            for column, _ in self._sent_by(FlowKind.REDUCE, group, interval):
                yield column, -max(rates)

    def _objective(self) -> tuple[NDArray[np.float64], float]:
        """Return the cost vector, and the most that tie-breaking adds to the cost, in seconds.

        Messages slow computation down, so each second of overlapped communication costs a share.
        """
        slowdown_share = 1 - 1 / self._profile.slowdown
        cost = np.zeros(self._num_columns)
        cost[self._wait_columns] = 1 - slowdown_share
        slack_s = _TIE_BREAK_SHARE * sum(self._interval_seconds)
        most_s = sum(max(o.link_s for o in unit_options) for unit_options in self._options)
        most_bytes = sum(
            max(o.unit_memory.persistent for o in unit_options) for unit_options in self._options
        )
        for unit, (unit_options, columns) in enumerate(
            zip(self._options, self._choice_columns, strict=True)
        ):
            for column, option in zip(columns, unit_options, strict=True):
                cost[column] += option.recompute_s + slowdown_share * option.link_s
                # Of equal solutions, prefer less memory and less traffic. Prefer to unshard early
                # units a second time rather than late ones: early ones would be kept for longer.
                late_s = option.unshard_for_backward_s * unit / len(self._options)
                share = option.unit_memory.persistent / most_bytes
                share += (option.link_s + late_s) / max(most_s, 1e-12)
                cost[column] += slack_s * share / 6
        # Of equal solutions, prefer late unshards and early reductions.
        tie = slack_s / max(2 * most_s * (self.slots.count + 1), 1e-12)
        for (flow, _), columns_by_interval in self._sent_columns.items():
            cost[list(columns_by_interval.values())] += -tie if flow is FlowKind.REDUCE else tie
        return cost, slack_s

    @property
    def num_slots(self) -> int:
        """The number of unit slots in a cycle."""
        return self._unit_slots.count

    def fullest_slot(self, interval: int) -> int:
        """Return the unit slot of an interval in which memory is limited: its last unit's slot."""
        unit_options = self._slots_in(interval)
        return unit_options[0] if interval < self.slots.update else unit_options[-1]

    def first_slot(self, interval: int) -> int:
        """Return the first unit slot of an interval, which may be in the next cycle."""
        cycle, interval = divmod(interval, self.slots.count)
        return self._slots_in(interval)[0] + cycle * self._unit_slots.count

    def last_slot(self, interval: int) -> int:
        """Return the last unit slot of an interval, which may be in the next cycle."""
        cycle, interval = divmod(interval, self.slots.count)
        return self._slots_in(interval)[-1] + cycle * self._unit_slots.count

    def selected_options(self, x: NDArray[np.float64]) -> list[UnitOption]:
        """Return for each unit the option with the largest value in solution ``x``."""
        pairs = zip(self._options, self._choice_columns, strict=True)
        return [unit_options[int(np.argmax(x[columns]))] for unit_options, columns in pairs]

    def flow(self, x: NDArray[np.float64], flow: FlowKind, group: int) -> dict[int, float]:
        """Return, by interval, the share of a group's messages that ``x`` has sent by its end."""
        columns = self._sent_columns.get((flow, group), {})
        total = x[max(columns.values())] if columns else 0.0
        return (
            {t: float(x[column] / total) for t, column in columns.items()} if total > 1e-9 else {}
        )


def _resident_bytes(option: UnitOption, unit: int, last: int, interval: int, slots: Slots) -> int:
    """Return the bytes of a unit while unit ``last`` runs, without prefetches and gradients."""
    if unit > last:
        return 0
    kept = option.saved_activation_bytes
    if unit == last:
        return (
            kept
            + option.running_extra_bytes
            + option.unit_memory.unsharded
            - _shard_overlap_bytes(option, interval, slots)
        )
    if option.choice.sharding is Sharding.ZERO2:
        return kept + option.unit_memory.unsharded - option.unit_memory.shard_overlap
    return kept


def _shard_overlap_bytes(option: UnitOption, interval: int, slots: Slots) -> int:
    """Return the bytes of the running unit's shard that overlap its whole parameters."""
    stays_for_update = option.choice.sharding is Sharding.ZERO2 and interval > slots.update
    return option.unit_memory.shard_overlap if stays_for_update else 0

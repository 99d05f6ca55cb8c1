"""Predict the step time of a plan by simulation (`time_plan`).

`FastTiming` simulates links with one lane: there the end of each message is known when it is sent.
It follows the rules of `stretto.planner.exact_timing`, which simulates links with several lanes.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from stretto.errors import ConfigError
from stretto.planner.check import ready_half_slot
from stretto.planner.exact_timing import CycleTiming, ExactTiming, TimeInterval
from stretto.planner.plan import MessageKind, Plan, PlanMessage
from stretto.planner.presets import UnitShape
from stretto.planner.profile import Profile, UnitCost

_MAX_CYCLES = 64
_RELATIVE_TOLERANCE = 1e-9


class FastTiming:
    """A simulated run over a link with one lane; messages are sent in the order of the plan."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.plan, self._slots = plan, plan.slots
        checkpoints = [unit.checkpoint for unit in plan.units]
        self._slot_seconds = profile.slot_seconds(checkpoints, barrier=plan.barrier)
        self._slowdown = profile.slowdown
        self._message_seconds = [profile.message_s(plan, m) for m in plan.messages]
        self._ready_half_slots = [ready_half_slot(plan, message) for message in plan.messages]
        self._messages_due: list[list[int]] = [[] for _ in range(self._slots.count)]
        for index, message in enumerate(plan.messages):
            self._messages_due[message.due].append(index)
        self._now_s = self._link_free_s = 0.0
        self.cycle = -1
        self._starts_s = [0.0] * len(plan.messages)
        self._ends = [0.0] * len(plan.messages)
        self._waiting_messages = [
            (self._ready_half_slots[i] - self._half_slots_per_cycle, i)
            for i in self._first_forward()
        ]
        self._num_sent = 0
        self._run_slots(range(self._slots.update + 1, self._slots.count))

    @property
    def _half_slots_per_cycle(self) -> int:
        """The number of half slots in a cycle."""
        return 2 * self._slots.count

    def _first_forward(self) -> list[int]:
        return [i for i, m in enumerate(self.plan.messages) if _is_of_first_forward(self.plan, m)]

    def run_cycle(self) -> CycleTiming:
        """Run a backward, the update, and the forward of the next step."""
        self.cycle += 1
        cycle_start_s = self._now_s
        self._enqueue_cycle()
        slot_times = self._run_slots(range(self._slots.count))
        slots = [
            TimeInterval(start - cycle_start_s, end - cycle_start_s) for start, end in slot_times
        ]
        pairs = zip(self._starts_s, self._ends, strict=True)
        messages = [
            TimeInterval(start - cycle_start_s, end - cycle_start_s) for start, end in pairs
        ]
        return CycleTiming(self._now_s - cycle_start_s, slots, messages)

    def _enqueue_cycle(self) -> None:
        """Queue the messages of a cycle behind those that are left."""
        cycle_offset = self.cycle * self._half_slots_per_cycle
        remaining = self._waiting_messages[self._num_sent :]
        self._waiting_messages = remaining + [
            (ready_half_slot + cycle_offset, i)
            for i, ready_half_slot in enumerate(self._ready_half_slots)
        ]
        self._num_sent = 0

    def _run_slots(self, slots: range) -> list[tuple[float, float]]:
        slot_times: list[tuple[float, float]] = []
        first = self.cycle * self._half_slots_per_cycle
        for slot in slots:
            self._reach_half_slot(first + 2 * slot)
            for index in self._messages_due[slot]:
                self._wait_for(index)
            start_s = self._now_s
            self._compute(self._slot_seconds[slot])
            slot_times.append((start_s, self._now_s))
            self._reach_half_slot(first + 2 * slot + 1)
        return slot_times

    def _reach_half_slot(self, half_slot: int) -> None:
        waiting, num_sent = self._waiting_messages, self._num_sent
        while num_sent < len(waiting) and waiting[num_sent][0] <= half_slot:
            self._send(waiting[num_sent][1])
            num_sent += 1
        self._num_sent = num_sent

    def _send(self, index: int) -> None:
        """Send a message as soon as the link is free."""
        self._starts_s[index] = max(self._link_free_s, self._now_s)
        self._link_free_s = self._ends[index] = self._starts_s[index] + self._message_seconds[index]

    def _wait_for(self, index: int) -> None:
        self._now_s = max(self._now_s, self._ends[index])

    def _compute(self, compute_s: float) -> None:
        busy_s = max(self._link_free_s - self._now_s, 0.0)
        if busy_s >= compute_s * self._slowdown:
            self._now_s += compute_s * self._slowdown
        else:
            self._now_s += compute_s + busy_s * (1 - 1 / self._slowdown)


class UrgentFirstTiming(FastTiming):
    """A simulated run in which a free link sends the ready message with the earliest deadline.

    ``latest_s`` is the latest start of each message, in a step of ``step_s`` seconds.
    """

    def __init__(
        self, plan: Plan, profile: Profile, latest_s: Sequence[float], step_s: float
    ) -> None:
        self._latest_s, self._step_s = latest_s, step_s
        self._heap: list[tuple[float, int, int]] = []
        self.sent_order: list[tuple[int, int]] = []
        """The messages sent in this cycle, as (cycle that the message belongs to, index)."""
        self._num_ready = [0] * len(plan.messages)
        self._blocks_left: dict[int, int] = {}
        self._dependent_unshards = _dependent_unshards(plan)
        self._missing_inputs: set[tuple[int, int]] = set()
        super().__init__(plan, profile)

    def _enqueue_cycle(self) -> None:
        self.sent_order.clear()
        self._missing_inputs = {
            (self.cycle, i) for dependents in self._dependent_unshards.values() for i in dependents
        }
        reductions = (m.unit for m in self.plan.messages if m.what is MessageKind.REDUCE)
        self._blocks_left = {}
        for unit in reductions:
            self._blocks_left[unit] = self._blocks_left.get(unit, 0) + 1
        super()._enqueue_cycle()
        self._waiting_messages.sort()

    def _reach_half_slot(self, half_slot: int) -> None:
        waiting, num_sent = self._waiting_messages, self._num_sent
        while num_sent < len(waiting) and waiting[num_sent][0] <= half_slot:
            ready_half_slot, index = waiting[num_sent]
            cycle = (ready_half_slot - self._ready_half_slots[index]) // self._half_slots_per_cycle
            self._make_ready_or_hold((cycle, index))
            num_sent += 1
        self._num_sent = num_sent
        if not half_slot % 2:  # after the messages that the slot before made ready are queued, too
            self._send_until(self._now_s)

    def _make_ready_or_hold(self, message_key: tuple[int, int]) -> None:
        """Make a message whose gate is reached ready, or hold it until its data is ready."""
        if message_key in self._missing_inputs:
            self._missing_inputs.remove(message_key)
            self._missing_inputs.add((message_key[0], ~message_key[1]))
            return
        self._push_ready(message_key)

    def _push_ready(self, message_key: tuple[int, int]) -> None:
        self._num_ready[message_key[1]] += 1
        urgency = self._latest_s[message_key[1]] + message_key[0] * self._step_s
        heapq.heappush(self._heap, (urgency, *message_key))

    def _mark_inputs_ready(self, message_key: tuple[int, int]) -> None:
        """Record that an unshard's data will be ready when the link is free."""
        if (message_key[0], ~message_key[1]) in self._missing_inputs:
            self._missing_inputs.remove((message_key[0], ~message_key[1]))
            self._push_ready(message_key)
        self._missing_inputs.discard(message_key)

    def _send_until(self, until_s: float) -> None:
        """Send ready messages while the link is free no later than ``until_s``."""
        while self._heap and self._link_free_s <= until_s:
            self._send_most_urgent()

    def _send_most_urgent(self) -> None:
        _, cycle, index = heapq.heappop(self._heap)
        self._num_ready[index] -= 1
        self._send(index)
        self.sent_order.append((cycle, index))
        message = self.plan.messages[index]
        if message.what is not MessageKind.REDUCE:
            return
        self._blocks_left[message.unit] -= 1
        if self.plan.whole_layers and self._blocks_left[message.unit]:
            return
        for dependent in self._dependent_unshards.get(index, ()):
            self._mark_inputs_ready((cycle, dependent))

    def _wait_for(self, index: int) -> None:
        while self._num_ready[index] and self._heap:
            self._send_most_urgent()
        super()._wait_for(index)

    def _compute(self, compute_s: float) -> None:
        while self._heap and self._link_free_s - self._now_s < compute_s * self._slowdown:
            busy_s = max(self._link_free_s - self._now_s, 0.0)
            self._now_s += busy_s
            compute_s -= busy_s / self._slowdown
            self._send_most_urgent()
        super()._compute(compute_s)


def _is_of_first_forward(plan: Plan, message: PlanMessage) -> bool:
    if message.what is MessageKind.UNSHARD_FOR_BACKWARD:
        return plan.slots.is_forward(message.gate)
    return (
        message.what is MessageKind.UNSHARD and plan.units[message.unit].sharding.shards_parameters
    )


def _dependent_unshards(plan: Plan) -> dict[int, list[int]]:
    """Return, for each reduction, the unshards that wait for it.

    These are the unshards of its block, or of its whole unit if the optimizer reads whole units.
    """
    unshards: dict[int, list[int]] = {}
    for index, message in enumerate(plan.messages):
        if message.what is MessageKind.UNSHARD:
            unshards.setdefault(message.unit, []).append(index)
    return {
        index: [
            i
            for i in unshards.get(message.unit, ())
            if plan.whole_layers or plan.messages[i].block == message.block
        ]
        for index, message in enumerate(plan.messages)
        if message.what is MessageKind.REDUCE
    }


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The times of one step in steady state."""

    step_s: float
    slots: tuple[TimeInterval, ...]
    """When each slot ran, without the wait before it."""
    messages: tuple[TimeInterval, ...]
    """When the link was busy with each message, in the order of the plan. The last messages may be
    sent only in the backward that follows."""

    @property
    def waited_s(self) -> float:
        """Seconds in which computation waited for messages."""
        return self.step_s - sum(slot.end_s - slot.start_s for slot in self.slots)


def time_plan(plan: Plan, profile: Profile) -> StepTiming:
    """Simulate ``plan`` until consecutive steps take equally long, and return the last step.

    Raises:
        ConfigError: The profile is of another model.
    """
    shapes = [UnitShape(unit.name, unit.numel) for unit in plan.units]
    check_same_units(profile, shapes, "this")
    profile = profile.adjusted_for(plan)
    timing_run = (FastTiming if profile.link.lanes == 1 else ExactTiming)(plan, profile)
    before_s = 0.0
    for _ in range(_MAX_CYCLES):
        cycle = timing_run.run_cycle()
        if abs(cycle.step_s - before_s) <= _RELATIVE_TOLERANCE * cycle.step_s:
            break
        before_s = cycle.step_s
    return StepTiming(cycle.step_s, tuple(cycle.slots), tuple(cycle.messages))


def check_same_units(profile: Profile, shapes: Sequence[UnitShape], profile_name: str) -> None:
    """Check that ``profile`` has these units; error messages call it ``profile_name``.

    Raises:
        ConfigError: Its units are others.
    """
    for index, (cost, shape) in enumerate(zip_longest(profile.units, shapes)):
        if cost is None or shape is None or (cost.name, cost.numel) != (shape.name, shape.numel):
            raise ConfigError(
                f"{profile_name} is a profile of another model: its unit {index} is "
                f"{_describe_unit(cost)}, here it is {_describe_unit(shape)}; make it anew for "
                "this model and strategy.unit"
            )


def _describe_unit(unit: UnitCost | UnitShape | None) -> str:
    return "missing" if unit is None else f"{unit.name} of {unit.numel} elements"

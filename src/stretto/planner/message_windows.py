"""Choose the windows and the order of a plan's messages within a memory limit.

1. `just_in_time_plan` unshards every unit when it is used and reduces every gradient at once. No
   plan with the same sharding keeps less.
2. `fit_windows` widens the windows one slot at a time, in turn, as far as memory allows.
3. `order_by_urgency` sorts the messages by their deadlines in a simulated run.
4. `trim_windows` narrows windows that are wider than the simulated run needs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stretto.planner.check import allowed_window
from stretto.planner.exact_timing import TimeInterval
from stretto.planner.memory import (
    PHASES_PER_SLOT,
    Footprints,
    bytes_by_phase,
    entry_phase,
    exit_phase,
)
from stretto.planner.plan import MessageKind, Plan, PlanMessage, Slots, Unit
from stretto.planner.presets import MessageTiming, build_plan
from stretto.planner.profile import Profile
from stretto.planner.timing import StepTiming, UrgentFirstTiming, time_plan

MessageKey = tuple[MessageKind, int, int]
"""(kind, unit, block). All blocks of a unit are unsharded into one allocation, so their unshards
share one gate, that of block 0."""
_SIMULATED_CYCLES = 3
_REORDERING_ROUNDS = 2
_SLACK_SLOTS = 2
"""Slots of slack that `trim_windows` leaves before and after a message's simulated time."""


@dataclass(frozen=True, slots=True)
class WindowWidth:
    """The desired width of windows: one number of slots for all, or a target slot for each."""

    prefetch: int
    """How many slots before its use a unit may be unsharded."""
    reduce_slots: int
    """Slots that a gradient may wait for its reduction, beyond the slot after its backward."""
    targets: Mapping[MessageKey, int] = field(default_factory=dict)
    """The earliest gate or the latest due slot of single messages; overrides the other fields."""
    first: tuple[MessageKey, ...] = ()
    """Messages whose windows are widened before all others."""


def just_in_time_plan(units: Sequence[Unit], *, barrier: bool, whole_layers: bool) -> Plan:
    """Return the plan of ``units`` that keeps least: late unshards, immediate reductions."""
    bare = Plan(units=tuple(units), messages=(), barrier=barrier, whole_layers=whole_layers)

    def timing(slots: Slots, what: MessageKind, unit: int, _block: int) -> MessageTiming:
        _, last = allowed_window(bare, what, unit)
        if what is MessageKind.REDUCE:
            backward = slots.backward(unit)
            return MessageTiming(backward, min(backward + 1, last), 2 * backward + 1)
        in_next_cycle = barrier and what is MessageKind.UNSHARD and last == slots.update + 1
        return MessageTiming(
            last, last, max(2 * last, 2 * slots.update + 1) if in_next_cycle else 2 * last
        )

    return build_plan(units, timing, barrier=barrier, whole_layers=whole_layers)


class WindowWidener:
    """Widens windows and keeps track of the free bytes at each moment of the cycle."""

    def __init__(self, plan: Plan, footprints: Footprints, memory_limit: int) -> None:
        self._plan, self._slots = plan, plan.slots
        self._unit_memories = footprints.unit_memories(plan)
        activation_bytes = (
            num_bytes for num_bytes in footprints.activations(plan) for _ in range(PHASES_PER_SLOT)
        )
        kept = zip(bytes_by_phase(plan, self._unit_memories), activation_bytes, strict=True)
        self._free_bytes = [memory_limit - state - other for state, other in kept]
        self.slots: dict[MessageKey, int] = {}
        """The current gates of unshards and due slots of reductions."""
        for message in plan.messages:
            self._record_window(message)
        self._bytes_per_phase = {key: self._window_bytes_per_phase(key) for key in self.slots}

    def _record_window(self, message: PlanMessage) -> None:
        key = (message.what, message.unit, message.block)
        if message.what is MessageKind.REDUCE:
            self.slots[key] = message.due
            return
        in_next_cycle = (
            message.what is MessageKind.UNSHARD_FOR_BACKWARD
            and not self._slots.is_forward(message.gate)
        )
        gate = message.gate + self._slots.count * in_next_cycle
        key = (message.what, message.unit, 0)
        self.slots[key] = min(gate, self.slots.get(key, gate))

    @property
    def least_free_bytes(self) -> int:
        """Free bytes at the fullest moment; negative if the plan exceeds the limit."""
        return min(self._free_bytes)

    def widen(self, window_width: WindowWidth) -> None:
        """Widen all windows in turn, up to ``window_width`` and as far as memory allows."""
        prioritized = [key for key in window_width.first if key in self.slots]
        for keys in (prioritized, list(self.slots)):
            target_slots = {key: self._target_slot(key, window_width) for key in keys}
            left = [key for key in keys if self.slots[key] != target_slots[key]]
            while left:
                left = [
                    key
                    for key in left
                    if self._widen_by_one_slot(key) and self.slots[key] != target_slots[key]
                ]

    def _target_slot(self, key: MessageKey, window_width: WindowWidth) -> int:
        what, unit, _ = key
        first, last = allowed_window(self._plan, what, unit)
        now = self.slots[key]
        if what is MessageKind.REDUCE:
            target = window_width.targets.get(
                key, self._slots.backward(unit) + 1 + window_width.reduce_slots
            )
            return max(now, min(target, last))
        target = window_width.targets.get(key, last - window_width.prefetch)
        return min(now, max(target, first))

    def _widen_by_one_slot(self, key: MessageKey) -> bool:
        """Widen one window by one slot if memory allows; return whether it was widened."""
        now, num_bytes = self.slots[key], self._bytes_per_phase[key]
        if key[0] is MessageKind.REDUCE:
            after = now + 1
            phases = range(entry_phase(now) + 1, entry_phase(after) + 1)
        else:
            after = now - 1
            phases = range(self._unshard_phase(key[0], after), self._unshard_phase(key[0], now))
        if num_bytes:
            free, count = self._free_bytes, len(self._free_bytes)
            for phase in phases:
                if free[phase % count] < num_bytes:
                    return False
            for phase in phases:
                free[phase % count] -= num_bytes
        self.slots[key] = after
        return True

    def _window_bytes_per_phase(self, key: MessageKey) -> int:
        """Return the bytes that each extra moment of a window costs."""
        what, unit, block = key
        unit_memory = self._unit_memories[unit]
        if what is not MessageKind.REDUCE:
            return unit_memory.unsharded
        if self._plan.barrier:
            return 0 if unit_memory.updates_in_place else unit_memory.gradients[block]
        return unit_memory.gradients[block] + unit_memory.reduced_gradients[block]

    def _unshard_phase(self, what: MessageKind, gate: int) -> int:
        waits_for_update = self._plan.barrier and what is MessageKind.UNSHARD
        return (
            max(entry_phase(gate), exit_phase(self._slots.update))
            if waits_for_update
            else entry_phase(gate)
        )

    def widened_plan(self) -> Plan:
        """Return the plan with its current windows, its messages in the old order."""
        return self._plan.replace(messages=tuple(map(self._with_window, self._plan.messages)))

    def _with_window(self, message: PlanMessage) -> PlanMessage:
        count = self._slots.count
        if message.what is MessageKind.REDUCE:
            due = self.slots[message.what, message.unit, message.block]
            return message.model_copy(update={"due": due})
        gate = self.slots[message.what, message.unit, 0]
        # A message keeps its place in the order, so its gate must stay in the same cycle.
        if message.what is MessageKind.UNSHARD_FOR_BACKWARD and not self._slots.is_forward(
            message.gate
        ):
            gate = max(gate, count)
        return message.model_copy(update={"gate": gate % count})


def fit_windows(
    units: Sequence[Unit],
    footprints: Footprints,
    memory_limit: int,
    window_width: WindowWidth,
    tight: Plan,
) -> Plan | None:
    """Return plan ``tight`` with windows up to ``window_width``, as far as memory allows.

    Messages are ordered by their gates. None if even ``tight`` exceeds ``memory_limit`` bytes.
    """
    widener = WindowWidener(tight, footprints, memory_limit)
    if widener.least_free_bytes < 0:
        return None
    widener.widen(window_width)
    slots = tight.slots

    def timing(_: Slots, what: MessageKind, unit: int, block: int) -> MessageTiming:
        if what is MessageKind.REDUCE:
            backward = slots.backward(unit)
            return MessageTiming(backward, widener.slots[what, unit, block], 2 * backward + 1)
        gate = widener.slots[what, unit, 0]
        used_slot = slots.forward(unit)
        if what is MessageKind.UNSHARD_FOR_BACKWARD:
            used_slot = slots.count + slots.backward(unit)
            return MessageTiming(gate, used_slot, 2 * gate)
        first = max(2 * gate, 2 * slots.update + 1) if tight.barrier else 2 * gate
        return MessageTiming(gate, used_slot, first)

    return build_plan(units, timing, barrier=tight.barrier, whole_layers=tight.whole_layers)


def order_by_urgency(plan: Plan, profile: Profile) -> Plan | None:
    """Return ``plan`` with its messages in the order of their deadlines.

    The order is that of a simulated run whose free link always sends the most urgent ready message.
    None if that run reaches no steady order.
    """
    slot_seconds = profile.slot_seconds(
        [unit.checkpoint for unit in plan.units], barrier=plan.barrier
    )
    slots, at_s = [], 0.0
    for length in slot_seconds:
        slots.append(TimeInterval(at_s, at_s + length))
        at_s += length
    ordered: Plan | None = None
    for _ in range(_REORDERING_ROUNDS):
        timing_run = UrgentFirstTiming(
            plan, profile, _latest_starts(plan, profile, slots, at_s), at_s
        )
        for _ in range(_SIMULATED_CYCLES):
            cycle = timing_run.run_cycle()
        slots, at_s = cycle.slots, cycle.step_s
        ordered = _in_sent_order(plan, timing_run) or ordered
    return ordered


def _latest_starts(
    plan: Plan, profile: Profile, slots: Sequence[TimeInterval], step_s: float
) -> list[float]:
    """Return when each message must start so that no slot waits, if the link were free for it."""
    unshards = {(m.unit, m.block): m for m in plan.messages if m.what is MessageKind.UNSHARD}
    latest: list[float] = []
    for message in plan.messages:
        in_next_cycle = message.what is MessageKind.UNSHARD_FOR_BACKWARD and plan.slots.is_forward(
            message.gate
        )
        due_s = slots[message.due].start_s + step_s * in_next_cycle
        unshard = unshards.get((message.unit, message.block))
        if message.what is MessageKind.REDUCE and unshard is not None:
            used_s = slots[unshard.due].start_s
            due_s = min(due_s, used_s - profile.message_s(plan, unshard))
        latest.append(due_s - profile.message_s(plan, message))
    return latest


def _in_sent_order(plan: Plan, timing_run: UrgentFirstTiming) -> Plan | None:
    """Return the plan in the order of a run's last cycle; None if not every message went once."""
    sent: list[PlanMessage] = []
    for cycle, index in timing_run.sent_order:
        message = plan.messages[index]
        if cycle < timing_run.cycle and plan.slots.is_forward(message.gate):
            # It was sent only in the backward that needs it, so its gate may be there.
            message = message.model_copy(update={"gate": 0})
        sent.append(message)
    once = {(m.what, m.unit, m.block) for m in sent}
    if len(once) != len(sent) or len(sent) != len(plan.messages):
        return None
    return plan.replace(messages=tuple(sent))


def trim_windows(plan: Plan, profile: Profile) -> Plan:
    """Return ``plan`` with windows close to the simulated time of each message.

    The simulated step time stays the same. In a real run, a window that is too wide lets a rank run
    ahead of the others, which then lack its share of cores and links. It also keeps more memory.
    """
    timed = time_plan(plan, profile)
    messages = tuple(
        _narrow_window(plan, message, timed, index) for index, message in enumerate(plan.messages)
    )
    return plan.replace(messages=messages)


def _narrow_window(plan: Plan, message: PlanMessage, timed: StepTiming, index: int) -> PlanMessage:
    start_s, end_s = timed.messages[index]
    if message.what is MessageKind.REDUCE:
        end_slot = bisect_left([slot.start_s for slot in timed.slots], end_s - 1e-12)
        return message.model_copy(update={"due": min(message.due, end_slot + _SLACK_SLOTS)})
    # The gate must stay in its cycle: the message keeps its place in the order.
    slot_entry_s = [timed.slots[-1].end_s - timed.step_s, *(slot.end_s for slot in timed.slots)]
    start_slot = bisect_right(slot_entry_s[:-1], start_s + 1e-12) - 1
    in_forward = plan.slots.is_forward(message.gate)
    if message.what is MessageKind.UNSHARD_FOR_BACKWARD and in_forward and start_s >= timed.step_s:
        start_slot = plan.slots.count - 1
    return message.model_copy(update={"gate": max(message.gate, start_slot - _SLACK_SLOTS)})

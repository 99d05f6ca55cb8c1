"""The memory that a plan needs on one rank, slot by slot.

`worst_case_curve` and `zero_latency_curve` cover model states and messages, not activations:

- `worst_case_curve` counts whole parameters from the slot at which their unshard may start, and
  gradients until the slot that waits for their reduction. No run keeps more.
- `zero_latency_curve` is exact if no message takes any time. It equals the memory tracker of a run
  over a transport without delay.

`Footprints` adds the activations, buffers and allocator overhead of a profile.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from stretto.comm.shard_layout import ALIGN, UnitLayout, make_unit_layout
from stretto.planner.check import ready_half_slot
from stretto.planner.plan import ElementBytes, MessageKind, Plan, PlanMessage, Sharding, Unit
from stretto.planner.profile import Profile


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """Bytes that one rank keeps for one unit."""

    persistent: int
    """Kept all the time: parameters or own chunks, master copies, optimizer state."""
    unsharded: int
    """Whole parameters, if they exist only around their use; else 0."""
    shard_overlap: int
    """Bytes of ``persistent`` that lie inside the whole parameters while those exist."""
    gradients: tuple[int, ...]
    """Gradients of each block, from the unit's backward until they are reduced."""
    reduced_gradients: tuple[int, ...]
    """Reduced gradients of each block, if they are copied for the update; else 0."""
    updates_in_place: bool
    """Whether a barrier update reads the gradients from the memory in which they were reduced."""

    def with_allocator_overhead(self, share: float) -> "UnitMemory":
        """Return the bytes multiplied by ``1 + share``, for an allocator that wastes this share."""

        def with_overhead(num_bytes: int) -> int:
            return math.ceil(num_bytes * (1 + share))

        return UnitMemory(
            with_overhead(self.persistent),
            with_overhead(self.unsharded),
            self.shard_overlap,  # subtracted elsewhere: its overhead remains allocated
            tuple(map(with_overhead, self.gradients)),
            tuple(map(with_overhead, self.reduced_gradients)),
            self.updates_in_place,
        )


def compute_unit_memory(
    unit: Unit, layout: UnitLayout, element_bytes: ElementBytes, rank: int, barrier: bool
) -> UnitMemory:
    """Return the bytes that ``rank``, one of the ranks that shard the unit, keeps for ``unit``."""
    sharding, is_recast = unit.sharding, element_bytes.gradient != element_bytes.kept
    whole = layout.numel * element_bytes.parameter
    gradients = tuple(block.gradient_numel * element_bytes.gradient for block in layout.blocks)
    if sharding.shards_optimizer:
        kept, owned = layout.shard_numel, layout.owned_numel(rank)
        sums = tuple(block.chunk * element_bytes.kept for block in layout.blocks)
    else:
        kept, owned = layout.numel, sum(layout.owned_numel(r) for r in range(layout.ranks))
        sums = tuple(block.numel * element_bytes.kept for block in layout.blocks)
    updates_in_place = not is_recast and sharding in (Sharding.DP, Sharding.ZERO1)
    is_copied = is_recast or (barrier and not updates_in_place)
    shard_bytes = kept * element_bytes.kept
    has_master = element_bytes.kept != element_bytes.parameter
    persistent = owned * element_bytes.state + (
        shard_bytes if sharding.shards_parameters else whole + shard_bytes * has_master
    )
    if sharding is Sharding.ZERO1:
        persistent, gradients = persistent + sum(gradients), (0,) * len(gradients)
    nothing = (0,) * len(gradients)
    return UnitMemory(
        persistent,
        whole if sharding.shards_parameters else 0,
        shard_bytes if sharding.shards_parameters and not has_master else 0,
        gradients,
        sums if is_copied else nothing,
        updates_in_place,
    )


def worst_case_curve(plan: Plan, unit_memories: Sequence[UnitMemory]) -> list[int]:
    """Return, for each slot of a cycle, the most bytes that a run of ``plan`` may keep in it."""
    kept = bytes_by_phase(plan, unit_memories)
    return [
        max(kept[first : first + PHASES_PER_SLOT]) for first in range(0, len(kept), PHASES_PER_SLOT)
    ]


def bytes_by_phase(plan: Plan, unit_memories: Sequence[UnitMemory]) -> list[int]:
    """Return the same for each of the three moments of each slot (see `PHASES_PER_SLOT`)."""
    count = PHASES_PER_SLOT * plan.slots.count
    changes = [0] * (2 * count + 1)
    for first, last, num_bytes in _memory_intervals(plan, unit_memories):
        changes[first] += num_bytes
        changes[last + 1] -= num_bytes
    unrolled = list(accumulate(changes))
    # Bytes that outlive a cycle coexist with those of the start of the next cycle.
    persistent = sum(unit_memory.persistent for unit_memory in unit_memories)
    return [persistent + unrolled[m] + unrolled[m + count] for m in range(count)]


PHASES_PER_SLOT = 3
"""The moments of a slot.

1. Entry: messages whose gate is this slot may start.
2. Compute: messages due here are complete, and the slot runs.
3. Exit: memory that the slot used is free, and messages that it made ready may start.
"""


def entry_phase(slot: int) -> int:
    """Return the moment at which a slot is entered."""
    return PHASES_PER_SLOT * slot


def compute_phase(slot: int) -> int:
    """Return the moment at which a slot computes."""
    return PHASES_PER_SLOT * slot + 1


def exit_phase(slot: int) -> int:
    """Return the last moment of a slot."""
    return PHASES_PER_SLOT * slot + 2


def _memory_intervals(
    plan: Plan, unit_memories: Sequence[UnitMemory]
) -> Iterator[tuple[int, int, int]]:
    """Yield (first moment, last moment, bytes) of everything that is not persistent."""
    slots = plan.slots
    gates: dict[tuple[MessageKind, int], int] = {}
    for message in plan.messages:
        unit_memory, key = unit_memories[message.unit], (message.what, message.unit)
        if message.what is not MessageKind.REDUCE:
            in_next_cycle = (
                message.what is MessageKind.UNSHARD_FOR_BACKWARD
                and not slots.is_forward(message.gate)
            )
            gate = message.gate + slots.count if in_next_cycle else message.gate
            gates[key] = min(gate, gates.get(key, gate))
            continue
        backward = slots.backward(message.unit)
        waits_for_update = plan.barrier and unit_memory.updates_in_place
        over = compute_phase(slots.update) if waits_for_update else entry_phase(message.due)
        # A unit used in several places may receive its first gradient at any time of backward.
        first = 0 if plan.units[message.unit].used_often else backward
        yield compute_phase(first), over, unit_memory.gradients[message.block]
        over = compute_phase(slots.update) if plan.barrier else entry_phase(message.due)
        yield exit_phase(backward), over, unit_memory.reduced_gradients[message.block]
    for (what, unit), gate in gates.items():
        used = slots.forward(unit)
        if what is MessageKind.UNSHARD_FOR_BACKWARD or plan.units[unit].sharding is Sharding.ZERO2:
            used = slots.count + slots.backward(unit)
        # With a barrier, no unshard starts before the update is complete.
        waits_for_update = plan.barrier and what is MessageKind.UNSHARD
        first = (
            max(entry_phase(gate), exit_phase(slots.update))
            if waits_for_update
            else entry_phase(gate)
        )
        yield first, compute_phase(used), unit_memories[unit].unsharded
        if what is MessageKind.UNSHARD and plan.units[unit].sharding is Sharding.ZERO2:
            yield (
                compute_phase(slots.forward(unit)),
                entry_phase(used),
                -unit_memories[unit].shard_overlap,
            )


def zero_latency_curve(plan: Plan, unit_memories: Sequence[UnitMemory]) -> list[int]:
    """Return the most bytes kept in each slot of a cycle if no message takes any time."""
    zero_latency_run = _ZeroLatencyRun(plan, unit_memories)
    zero_latency_run.run_forward()
    zero_latency_run.run_cycle()
    return zero_latency_run.run_cycle()


class _ZeroLatencyRun:
    """Simulates a run in which every message completes as soon as it may start."""

    def __init__(self, plan: Plan, unit_memories: Sequence[UnitMemory]) -> None:
        self._plan, self._slots = plan, plan.slots
        self._holdings = unit_memories
        self._live_bytes = sum(unit_memory.persistent for unit_memory in unit_memories)
        self._peaks: list[int] = []
        self._unsharded_blocks: dict[int, int] = {}
        """For each unit with whole parameters allocated: how many of its blocks are unsharded."""
        self._with_gradients: set[int] = set()
        self._updated = set(range(len(plan.units)))
        first = [m for m in plan.messages if m.what is not MessageKind.REDUCE]
        self._queue = [m for m in first if m.what is MessageKind.UNSHARD or self._is_in_forward(m)]

    def run_forward(self) -> None:
        """Run the forward of the first step; nothing was reduced before it."""
        for slot in range(self._slots.update + 1, self._slots.count):
            self._run(slot)

    def run_cycle(self) -> list[int]:
        """Run a backward, the update, and the forward of the next step."""
        self._queue += self._plan.messages
        self._updated.clear()
        self._with_gradients.clear()
        self._peaks = []
        for slot in range(self._slots.count):
            self._run(slot)
        return self._peaks

    def _run(self, slot: int) -> None:
        slots, plan = self._slots, self._plan
        self._peaks.append(self._live_bytes)
        self._start_ready_messages(2 * slot)
        if slot < slots.update:
            unit = slots.units - 1 - slot
            self._allocate(sum(self._holdings[unit].gradients))
            self._reshard(unit)
            self._with_gradients.add(unit)
        elif slot == slots.update:
            self._update_all()
        elif plan.units[slot - slots.units - 1].sharding is Sharding.ZERO3:
            self._reshard(slot - slots.units - 1)
        self._start_ready_messages(2 * slot + 1)

    def _update_all(self) -> None:
        if not self._plan.barrier:
            return
        for unit_memory in self._holdings:
            self._live_bytes -= sum(unit_memory.reduced_gradients) + (
                sum(unit_memory.gradients) if unit_memory.updates_in_place else 0
            )
        self._updated = set(range(len(self._plan.units)))

    def _allocate(self, num_bytes: int) -> None:
        self._live_bytes += num_bytes
        self._peaks[-1] = max(self._peaks[-1], self._live_bytes)

    def _reshard(self, unit: int) -> None:
        num_unsharded = self._unsharded_blocks.pop(unit, 0)
        if not num_unsharded:
            return
        if num_unsharded == len(self._plan.units[unit].blocks):
            self._allocate(self._holdings[unit].shard_overlap)
        self._live_bytes -= self._holdings[unit].unsharded

    def _is_in_forward(self, message: PlanMessage) -> bool:
        return self._slots.is_forward(message.gate)

    def _start_ready_messages(self, moment: int) -> None:
        while self._queue and self._is_ready(self._queue[0], moment):
            self._start(self._queue.pop(0))

    def _is_ready(self, message: PlanMessage, moment: int) -> bool:
        if ready_half_slot(self._plan, message) > moment:
            return False
        if message.what is MessageKind.REDUCE:
            return message.unit in self._with_gradients
        return message.what is MessageKind.UNSHARD_FOR_BACKWARD or message.unit in self._updated

    def _start(self, message: PlanMessage) -> None:
        unit = message.unit
        unit_memory = self._holdings[unit]
        if message.what is not MessageKind.REDUCE:
            self._allocate(0 if unit in self._unsharded_blocks else unit_memory.unsharded)
            self._unsharded_blocks[unit] = self._unsharded_blocks.get(unit, 0) + 1
            if self._unsharded_blocks[unit] == len(self._plan.units[unit].blocks):
                self._live_bytes -= unit_memory.shard_overlap
            return
        self._allocate(unit_memory.reduced_gradients[message.block])
        if self._plan.barrier:
            self._live_bytes -= (
                0 if unit_memory.updates_in_place else unit_memory.gradients[message.block]
            )
        else:
            self._live_bytes -= (
                unit_memory.gradients[message.block] + unit_memory.reduced_gradients[message.block]
            )
            self._updated.add(unit)


class Footprints:
    """The memory of plans for one profile, activations included; caches the bytes of each unit."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._unit_memory_cache: dict[tuple[object, ...], UnitMemory] = {}

    def curve(self, plan: Plan) -> list[int]:
        """Return, for each slot, the most bytes that a rank may keep in it."""
        states = worst_case_curve(plan, self.unit_memories(plan))
        return [state + more for state, more in zip(states, self.activations(plan), strict=True)]

    def peak(self, plan: Plan) -> int:
        """Return the most bytes that a rank may keep at once."""
        return max(self.curve(plan))

    def parts(self, plan: Plan) -> dict[str, list[int]]:
        """Return the curve split into its parts, at the fullest moment of each slot.

        A rank's own chunks inside whole parameters count once, under "always kept".
        """
        unit_memory = self.unit_memories(plan)
        whole = bytes_by_phase(plan, [_unsharded_only(one) for one in unit_memory])
        waiting = bytes_by_phase(plan, [_gradients_only(one) for one in unit_memory])
        most = [
            max(range(first, first + PHASES_PER_SLOT), key=lambda m: whole[m] + waiting[m])
            for first in range(0, len(whole), PHASES_PER_SLOT)
        ]
        other = self._profile.other_bytes
        persistent = sum(one.persistent for one in unit_memory) + other
        return {
            "always kept": [persistent] * plan.slots.count,
            "whole parameters": [whole[phase] for phase in most],
            "gradients waiting": [waiting[phase] for phase in most],
            "activations and workspace": [kept - other for kept in self.activations(plan)],
        }

    def unit_memories(self, plan: Plan) -> list[UnitMemory]:
        """Return, for each unit, the bytes of the rank that keeps most."""
        return [self.of_unit(i, unit, plan.barrier) for i, unit in enumerate(plan.units)]

    def of_unit(self, index: int, unit: Unit, barrier: bool) -> UnitMemory:
        """Return, for unit ``index`` of the profile, the bytes of the rank that keeps most."""
        key = (index, unit.sharding, unit.blocks, unit.in_host, barrier)
        if key not in self._unit_memory_cache:
            link, cost = self._profile.link, self._profile.units[index]
            ranks, grain = link.ranks, ALIGN
            if unit.in_host:
                ranks, grain = link.per_host, ALIGN * link.hosts
            layout = make_unit_layout(cost.tensors or (cost.numel,), unit.blocks, ranks, grain)
            # Rank 0 owns most: padding lies at the end, in the chunks of later ranks.
            unit_memory = compute_unit_memory(unit, layout, self._profile.element_bytes, 0, barrier)
            self._unit_memory_cache[key] = unit_memory.with_allocator_overhead(
                self._profile.allocator_overhead
            )
        return self._unit_memory_cache[key]

    def _receive_buffer_bytes(self, plan: Plan) -> int:
        """Return the bytes of receive buffers while the largest messages use all lanes."""
        link = self._profile.link
        if not link.copies or link.ranks == 1:
            return 0
        width = max(self._profile.gradient_bytes, self._profile.parameter_bytes)
        chunks = sorted(-(-b // link.ranks) for unit in plan.units for b in unit.blocks)
        return width * sum(chunks[-link.lanes :])

    def activations(self, plan: Plan) -> list[int]:
        """Return the bytes of each slot without model states: activations, workspace, buffers."""
        slots, kept = plan.slots, self._profile.other_bytes + self._receive_buffer_bytes(plan)
        curve = [kept] * slots.count
        for index, (unit, cost) in enumerate(zip(plan.units, self._profile.units, strict=True)):
            kept += cost.input_bytes if unit.checkpoint else cost.activation_bytes
            recomputed_bytes = (
                max(0, cost.activation_bytes - cost.input_bytes) if unit.checkpoint else 0
            )
            running = kept + recomputed_bytes + cost.workspace_bytes
            curve[slots.forward(index)] = curve[slots.backward(index)] = running
        return curve


def _unsharded_only(unit_memory: UnitMemory) -> UnitMemory:
    nothing = (0,) * len(unit_memory.gradients)
    return replace(unit_memory, persistent=0, gradients=nothing, reduced_gradients=nothing)


def _gradients_only(unit_memory: UnitMemory) -> UnitMemory:
    return replace(unit_memory, persistent=0, unsharded=0, shard_overlap=0)

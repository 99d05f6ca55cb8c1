"""The engine of the sharded strategy: it follows forward and backward and starts messages.

A cycle is one backward and the forward that follows it; the first forward belongs to cycle -1.
A backward that only accumulates is a cycle, too, in which nothing is reduced or updated.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from stretto.comm.reducer import GradientScaling
from stretto.comm.transport import Work
from stretto.errors import StrettoError
from stretto.planner.plan import MessageKind, Plan, Sharding
from stretto.strategies.sharded.comm_streams import CommStreams, InlineStreams, SideStreams
from stretto.strategies.sharded.scheduler import (
    MessageCallbacks,
    MessageTask,
    MessageTimeline,
    PlanTasks,
    Scheduler,
)
from stretto.strategies.sharded.shard_collectives import ShardCollectives
from stretto.strategies.sharded.sharded_unit import MemoryTracker
from stretto.strategies.sharded.updates import GroupOptions, ShardUpdates, UnitState


class Engine:
    """Executes one rank's part of a plan, driven by the hooks of forward and backward."""

    def __init__(
        self,
        plan: Plan,
        units: Sequence[UnitState],
        collectives: ShardCollectives,
        updates: ShardUpdates,
        memory_tracker: MemoryTracker,
        gradient_scaling: GradientScaling,
    ) -> None:
        self.plan, self._slots, self._units = plan, plan.slots, units
        self._collectives, self._updates = collectives, updates
        self._memory_tracker, self._gradient_scaling = memory_tracker, gradient_scaling
        device = units[0].sharded.flat.device
        self._comm_streams: CommStreams = (
            SideStreams(device) if device.type == "cuda" else InlineStreams()
        )
        self.scheduler = Scheduler(plan, MessageCallbacks(self._start_message, self._on_complete))
        self.is_finite: Callable[[], bool] = lambda: True
        """Called before a step's first update, without a barrier: returns whether to update."""
        self._tasks = PlanTasks(plan)
        self._cycle, self._slot = -1, 0
        self._in_backward = False
        self._declared: bool | None = None
        self._ends_step = False
        self._declared_cycle = -1
        self._gradients_missing = [0] * len(units)
        self._completed_units: set[int] = set()
        self._entered: set[int] = set()
        """Units whose forward has run since the last backward."""
        self._units_in_forward: set[int] = set()
        """Units whose forward has begun and not ended."""
        self._units_without_end: set[int] = set()
        """Units whose forward has no end hook: the parameters of their last module are used without
        a call of that module."""
        self._options: GroupOptions = []
        self._finite_by_cycle: dict[int, bool] = {}
        self._summed_blocks: dict[int, set[int]] = defaultdict(set)
        self._copies: list[Tensor] = []
        self._started = False
        self._waited_s = 0.0
        self.message_timeline: MessageTimeline | None = None
        """Records message spans; None on a GPU, where the host does not see messages complete."""

    def start(self) -> None:
        """Start unsharding for the first forward; further calls do nothing."""
        if not self._started:
            self._started = True
            self.scheduler.open_cycle(-1)
            self.scheduler.advance_to(-1, 2 * self._slots.update + 1)

    def declare_backward(self, *, last: bool) -> None:
        """Declare whether the next backward, or the one that just began, ends a step."""
        if self._in_backward and self._declared_cycle != self._cycle:
            self._apply_declaration(last)
            return
        if self._in_backward:
            self.end_backward()
        if self._declared is not None:
            # The last declared backward never ran: this rank had nothing to compute.
            self.end_backward()
        self._declared = last

    def enter_forward(self, unit: int) -> None:
        """Wait for a unit's parameters."""
        if self._in_backward:
            self.end_backward()
        self._entered.add(unit)
        for before in sorted(self._units_in_forward & self._units_without_end):
            if before < unit:
                self.leave_forward(before)
        self._units_in_forward.add(unit)
        slot = self._slots.forward(unit)
        self._enter_slot(slot)
        if not self._units[unit].sharded.is_unsharded:
            raise StrettoError(
                f"unit {unit} ({self.plan.units[unit].name}) is used again after its forward, when "
                'zero3 has let its parameters go: give it "zero2" in the plan, or take '
                'strategy.plan = "zero2"'
            )

    def leave_forward(self, unit: int) -> None:
        """Reshard a unit that is unsharded again for backward."""
        self._units_in_forward.discard(unit)
        if backward_unshards := self._tasks.backward_unshards(unit, self._cycle + 1):
            self.scheduler.call_unless_started(backward_unshards, self._units[unit].sharded.reshard)
        self.scheduler.advance_to(self._cycle, 2 * self._slots.forward(unit) + 1)

    def enter_backward(self, unit: int) -> None:
        """Wait for a unit's parameters and allocate its gradients."""
        self._begin_backward()
        if self._tasks.has_due(self._slots.backward(unit)):
            self._complete_skipped_units(self._slots.backward(unit))
        self._enter_slot(self._slots.backward(unit))
        if self._ends_step:
            self._units[unit].sharded.allocate_gradients()

    def on_gradient(self, unit: int, tensor: int) -> None:
        """Copy a gradient into its block; after the unit's last one, reshard and send them."""
        self._begin_backward()
        unit_state = self._units[unit]
        if not unit_state.always_active and self._slot < self._slots.backward(unit):
            self.enter_backward(unit)  # the parameter was used without a call of its module
        if unit not in self._entered:
            raise StrettoError(
                f"unit {unit} ({self.plan.units[unit].name}) has a gradient, but its module was "
                "not called, so its parameters were used before they were unsharded. Call the "
                "module, or set strategy.unit so high that it is joined to the one before it"
            )
        if unit in self._completed_units:
            raise StrettoError(
                f"a gradient of unit {unit} ({self.plan.units[unit].name}) came after the unit's "
                "backward was over: the model does not run its units in the order of the plan"
            )
        self._gradients_missing[unit] -= 1
        if self._ends_step:
            unit_state.sharded.allocate_gradients()
            self._copy_gradient(unit_state, tensor)
        if self._gradients_missing[unit] == 0:
            self._reshard(unit)
            self._send_gradients(unit)
            if self._slot == self._slots.backward(unit):
                self.scheduler.advance_to(self._cycle, 2 * self._slot + 1)

    def _complete_skipped_units(self, slot: int) -> None:
        """Send the gradients of units whose backward belongs before ``slot`` and did not run.

        ``slot`` waits for messages that are ordered behind theirs.
        """
        for unit, num_missing in enumerate(self._gradients_missing):
            if (
                num_missing
                and self._slots.backward(unit) < slot
                and not self._units[unit].always_active
            ):
                self._send_gradients(unit)

    def _copy_gradient(self, unit_state: UnitState, tensor: int) -> None:
        parameter = unit_state.sharded.parameters[tensor]
        if parameter.grad is not None:
            unit_state.gradient_input.copy_in(
                tensor, parameter.grad, self._gradient_scaling.local_weight()
            )
            parameter.grad = None

    def _send_gradients(self, unit: int) -> None:
        """Mark a unit's gradients as ready to send, with zeros for those that did not arrive."""
        if self._ends_step and unit not in self._completed_units:
            self._completed_units.add(unit)
            unit_state = self._units[unit]
            unit_state.sharded.allocate_gradients()
            # An earlier micro-batch may have left a gradient that this backward did not touch.
            for tensor in unit_state.gradient_input.missing:
                self._copy_gradient(unit_state, tensor)
            unit_state.gradient_input.close()
            self.scheduler.mark_gradients_ready(
                self._cycle, unit, range(len(unit_state.sharded.gradients))
            )

    def end_backward(self) -> None:
        """End the backward: fill in missing gradients with zeros and reshard unused units."""
        self._begin_backward()
        if self._declared is not None:
            self._apply_declaration(self._declared)
        for index in reversed(range(len(self._units))):
            self._send_gradients(index)
        self._in_backward = False
        self._entered.clear()
        self._enter_slot(self._slots.update)
        for index, num_missing in enumerate(self._gradients_missing):
            if num_missing:
                self._reshard_unused(index)
        if not self._ends_step or not self.plan.barrier:
            self.scheduler.advance_to(self._cycle, 2 * self._slots.update + 1)

    def pop_waited_s(self) -> float:
        """Return the seconds that computation has waited for messages since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def unshard_all(self) -> set[int]:
        """Finish all messages and unshard every unit; return the units that were not whole."""
        self.scheduler.drain(self._cycle)
        self._comm_streams.wait_for((m.what, m.unit, m.block) for m in self.plan.messages)
        newly_unsharded: set[int] = set()
        for index, unit_state in enumerate(self._units):
            tasks = self._tasks.unshards(index, self._cycle)
            if all(self.scheduler.is_complete(task) for task in tasks):
                continue
            if not unit_state.sharded.is_unsharded:
                newly_unsharded.add(index)
            unit_state.sharded.allocate_full()
            for block in range(len(unit_state.sharded.gradients)):
                unit_state.sharded.copy_chunks_to_full(block)
                self._collectives.unshard(index, block).wait()
        return newly_unsharded

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        # A unit whose forward did not run has not waited for its last reduction yet.
        self._wait_for_tasks(
            MessageTask(self._cycle, m) for m in self.plan.messages_of(MessageKind.REDUCE)
        )
        self._cycle += 1
        self._in_backward = True
        self._units_without_end |= self._units_in_forward
        self._units_in_forward.clear()
        self._gradients_missing = [len(unit_state.sharded.parameters) for unit_state in self._units]
        self._ends_step = False
        self._completed_units.clear()
        self._slot = 0
        self._memory_tracker.enter_slot(0)
        self.scheduler.open_cycle(self._cycle)
        self.scheduler.advance_to(self._cycle, 0)
        if self._declared is not None:
            self._apply_declaration(self._declared)

    def _apply_declaration(self, last: bool) -> None:
        """Set whether the gradients of the running backward are reduced."""
        self._declared, self._ends_step, self._declared_cycle = None, last, self._cycle
        if last:
            for unit_state in self._units:
                unit_state.gradient_input.begin()
            self._options = self._updates.options()
        self.scheduler.declare_backward(self._cycle, last=last)

    def _reshard(self, unit: int) -> None:
        zero3 = self.plan.units[unit].sharding is Sharding.ZERO3
        if zero3 or self._ends_step:
            next_unshards = self._tasks.unshards(unit, self._cycle)
            self.scheduler.call_unless_started(next_unshards, self._units[unit].sharded.reshard)

    def _reshard_unused(self, unit: int) -> None:
        """Reshard a unit whose backward did not run completely, once it is unsharded."""
        earlier_unshards = self._tasks.unshards(unit, self._cycle - 1)
        self._wait_for_tasks(earlier_unshards + self._tasks.backward_unshards(unit, self._cycle))
        # An update may still read the memory on a side stream: wait for it before freeing.
        self._comm_streams.wait_for(self._tasks.reduction_keys(unit))
        self._reshard(unit)

    def _enter_slot(self, slot: int) -> None:
        """Enter ``slot`` and wait for the messages that are due there."""
        self._slot = slot
        self._memory_tracker.enter_slot(slot)
        self.scheduler.advance_to(self._cycle, 2 * slot)
        self._wait_for_tasks(self._tasks.due_in(slot, self._cycle))
        self._comm_streams.release_finished()

    def _wait_for_tasks(self, tasks: Iterable[MessageTask]) -> None:
        needed, wait_started_s = list(tasks), time.monotonic()
        self.scheduler.wait_for_tasks(needed)
        self._waited_s += time.monotonic() - wait_started_s
        self._comm_streams.wait_for(task.key for task in needed)

    def _start_message(self, task: MessageTask) -> Work:
        """Start a message; the scheduler calls this on the thread that made it startable."""
        what, unit, block = task.key
        if self.message_timeline is not None:
            self.message_timeline.on_start(task)
        lane = self._collectives.lane(unit, block)
        if what is MessageKind.REDUCE:
            return self._comm_streams.send(
                task.key, partial(self._collectives.reduce, unit, block), lane
            )
        sharded_unit = self._units[unit].sharded
        # Allocated on the compute stream, which uses and frees this memory.
        sharded_unit.allocate_full()

        def unshard() -> Work:
            sharded_unit.copy_chunks_to_full(block)
            return self._collectives.unshard(unit, block)

        blocks = range(len(self.plan.units[unit].blocks))
        updated = [
            (MessageKind.REDUCE, unit, b) for b in blocks if b == block or self.plan.whole_layers
        ]
        work = self._comm_streams.send(task.key, unshard, lane, after=updated)
        if sharded_unit.has_copied_all_chunks:
            self._comm_streams.release_after(
                [(what, unit, b) for b in blocks], sharded_unit.merge_into_full
            )
        return work

    def _on_complete(self, task: MessageTask) -> bool:
        """Use a message that has completed; return whether it updated its block's parameters."""
        if self.message_timeline is not None:
            self.message_timeline.on_complete(task)
        if task.message.what is not MessageKind.REDUCE:
            return False
        with self._comm_streams.on_complete(task.key):
            freed_blocks = self._use_sums(task)
        sharded_unit = self._units[task.message.unit].sharded
        for block in freed_blocks:
            self._comm_streams.release_after(
                [task.key], partial(sharded_unit.free_block_gradients, block)
            )
        return bool(freed_blocks) and not self.plan.barrier

    def _use_sums(self, task: MessageTask) -> tuple[int, ...]:
        """Use the reduced gradients of a block; return the unit's blocks that may be freed."""
        _, unit, block = task.key
        if self.plan.barrier:
            return (block,) if self._hold_sums(unit, block) else ()
        summed = self._summed_blocks[unit]
        summed.add(block)
        if self.plan.whole_layers and len(summed) < len(self.plan.units[unit].blocks):
            return ()
        blocks = tuple(sorted(summed))
        summed.clear()
        if self._is_step_finite(task.cycle):
            self._update(unit, blocks)
        return blocks

    def set_step_finite(self, *, is_finite: bool) -> None:
        """Set whether the step whose backward has just ended may update parameters."""
        self._finite_by_cycle = {self._cycle: is_finite}

    def _is_step_finite(self, cycle: int) -> bool:
        if cycle not in self._finite_by_cycle:
            self._finite_by_cycle = {cycle: self.is_finite()}
        return self._finite_by_cycle[cycle]

    @torch.no_grad()
    def _update(self, unit: int, blocks: tuple[int, ...]) -> None:
        """Update the parameters of some blocks of a unit, on the calling thread."""
        sharded_unit = self._units[unit].sharded
        sharded_unit.split_from_full()
        copies = [
            c for b in blocks for c in self._updates.assign_gradients(unit, b, 1.0, copy=False)
        ]
        num_bytes = sum(copy.nbytes for copy in copies)
        self._memory_tracker.add("reduced gradients", num_bytes)
        self._updates.step(unit, blocks, self._options)
        self._updates.clear_gradients(unit, blocks)
        self._memory_tracker.add("optimizer", self._updates.new_state_bytes(unit))
        self._memory_tracker.add("reduced gradients", -num_bytes)
        if not sharded_unit.sharding.shards_optimizer:
            for block in blocks:
                sharded_unit.copy_chunks_to_full(block)

    @torch.no_grad()
    def _hold_sums(self, unit: int, block: int) -> bool:
        """Keep a block's sums for the update after the barrier; return whether they are copied."""
        sharded_unit = self._units[unit].sharded
        in_place = sharded_unit.sharding in (Sharding.DP, Sharding.ZERO1)
        copies = self._updates.assign_gradients(
            unit, block, self._gradient_scaling.divisor(), copy=not in_place
        )
        self._memory_tracker.add("reduced gradients", sum(copy.nbytes for copy in copies))
        self._copies += copies
        return bool(copies)

    def finish_update(self) -> None:
        """Free the gradients that were held for the update; start unsharding."""
        for index, unit_state in enumerate(self._units):
            self._updates.clear_gradients(index)
            self._memory_tracker.add("optimizer", self._updates.new_state_bytes(index))
            for block in range(len(unit_state.sharded.gradients)):
                unit_state.sharded.free_block_gradients(block)
                if not unit_state.sharded.sharding.shards_optimizer:
                    unit_state.sharded.copy_chunks_to_full(block)
        self._memory_tracker.add("reduced gradients", -sum(copy.nbytes for copy in self._copies))
        self._copies = []
        self.scheduler.updated(self._cycle)
        self.scheduler.advance_to(self._cycle, 2 * self._slots.update + 1)

"""Follows a model through forward and backward, and lets a plan's messages go.

A cycle is one backward and the forward that follows it; the first forward belongs to cycle -1.
Backward passes that only accumulate are cycles, too, in which nothing is reduced or updated.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from stretto.comm.channel import Pending
from stretto.comm.reducer import Weights
from stretto.errors import StrettoError
from stretto.plan.value import Message, Plan, Sharding, What
from stretto.strategy.sharded.aside import Aside, Here, Streams
from stretto.strategy.sharded.carriage import Carriage
from stretto.strategy.sharded.dispatcher import Dispatcher, Task, Work
from stretto.strategy.sharded.drawing import Drawing
from stretto.strategy.sharded.ledger import Ledger
from stretto.strategy.sharded.updates import Held, Options, Updates


class Engine:
    """One rank's part in a plan."""

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Held],
        carriage: Carriage,
        updates: Updates,
        ledger: Ledger,
        weights: Weights,
    ) -> None:
        self.plan, self._slots, self._units = plan, plan.slots, units
        self._carriage, self._updates, self._ledger = carriage, updates, ledger
        self._weights = weights
        device = units[0].storage.flat.device
        self._aside: Aside = Streams(device) if device.type == "cuda" else Here()
        self.dispatcher = Dispatcher(plan, Work(self._carry, self._land))
        self.sound: Callable[[], bool] = lambda: True
        """Asked before a step's first update, where updates do not wait: may there be any?"""
        self._dues: dict[int, list[Message]] = defaultdict(list)
        self._messages: dict[tuple[What, int], list[Message]] = defaultdict(list)
        for message in plan.messages:
            self._dues[message.due].append(message)
            self._messages[message.what, message.unit].append(message)
        self._cycle, self._slot = -1, 0
        self._in_backward = False
        self._announced: bool | None = None
        self._counts = False
        self._counted = -1
        self._left = [0] * len(units)
        self._complete_ones: set[int] = set()
        self._entered: set[int] = set()
        self._open: set[int] = set()
        """Units whose forward has begun and not ended."""
        self._endless: set[int] = set()
        """Those whose end nobody sees: their last module is read, and not called."""
        self._options: Options = []
        self._sound_in: dict[int, bool] = {}
        self._arrived: dict[int, set[int]] = defaultdict(set)
        self._copies: list[Tensor] = []
        self._started = False
        self._waited_s = 0.0
        self.drawing: Drawing | None = None
        """None on a GPU, where the host does not know when messages are over."""

    def start(self) -> None:
        """Let the gathers of the first forward begin; once."""
        if not self._started:
            self._started = True
            self.dispatcher.open_cycle(-1)
            self.dispatcher.arrive(-1, 2 * self._slots.update + 1)

    def announce(self, *, last: bool) -> None:
        """Say of the coming backward, or of the one that has just begun, whether it ends a step."""
        if self._in_backward and self._counted != self._cycle:
            self._count(last)
            return
        if self._in_backward:
            self.end_backward()
        if self._announced is not None:  # this rank had nothing to compute for the last one
            self.end_backward()
        self._announced = last

    def enter_forward(self, unit: int) -> None:
        """Wait for a unit's parameters."""
        if self._in_backward:
            self.end_backward()
        self._entered.add(unit)
        for before in sorted(self._open & self._endless):
            if before < unit:
                self.leave_forward(before)
        self._open.add(unit)
        slot = self._slots.forward(unit)
        self._enter(slot)
        if not self._units[unit].storage.live:
            raise StrettoError(
                f"unit {unit} ({self.plan.units[unit].name}) is used again after its forward, when "
                'zero3 has let its parameters go: give it "zero2" in the plan, or take '
                'strategy.plan = "zero2"'
            )

    def leave_forward(self, unit: int) -> None:
        """Let parameters go that backward will gather again."""
        self._open.discard(unit)
        if again := self._regathers(unit, self._cycle + 1):
            self.dispatcher.unless_begun(again, self._units[unit].storage.let_go)
        self.dispatcher.arrive(self._cycle, 2 * self._slots.forward(unit) + 1)

    def enter_backward(self, unit: int) -> None:
        """Wait for a unit's parameters, and make room for its gradients."""
        self._begin_backward()
        if self._dues[self._slots.backward(unit)]:
            self._pass_over(self._slots.backward(unit))
        self._enter(self._slots.backward(unit))
        if self._counts:
            self._units[unit].storage.room_for_gradients()

    def take_gradient(self, unit: int, tensor: int) -> None:
        """Take a gradient to where it travels from; the last one lets the unit go."""
        self._begin_backward()
        held = self._units[unit]
        if not held.spread and self._slot < self._slots.backward(unit):
            self.enter_backward(unit)  # a parameter that is used without a call of its module
        if unit not in self._entered:
            raise StrettoError(
                f"unit {unit} ({self.plan.units[unit].name}) has a gradient, but its module was "
                "not called: its parameters were used before they were there. Call the module, or "
                "set strategy.unit so high that it is joined to the one before it"
            )
        if unit in self._complete_ones:
            raise StrettoError(
                f"a gradient of unit {unit} ({self.plan.units[unit].name}) came after the unit's "
                "backward was over: the model does not run its units in the order of the plan"
            )
        self._left[unit] -= 1
        if self._counts:
            held.storage.room_for_gradients()
            self._take(held, tensor)
        if self._left[unit] == 0:
            self._let_go(unit)
            self._complete(unit)
            if self._slot == self._slots.backward(unit):
                self.dispatcher.arrive(self._cycle, 2 * self._slot + 1)

    def _pass_over(self, slot: int) -> None:
        """Let units leave whose backward would have been before ``slot``, which waits for some."""
        for unit, left in enumerate(self._left):
            if left and self._slots.backward(unit) < slot and not self._units[unit].spread:
                self._complete(unit)

    def _take(self, held: Held, tensor: int) -> None:
        parameter = held.storage.parameters[tensor]
        if parameter.grad is not None:
            held.intake.put(tensor, parameter.grad, self._weights.mine())
            parameter.grad = None

    def _complete(self, unit: int) -> None:
        """Let a unit's gradients leave; zeros stand for those that have not come."""
        if self._counts and unit not in self._complete_ones:
            self._complete_ones.add(unit)
            held = self._units[unit]
            held.storage.room_for_gradients()
            for tensor in held.intake.absent:  # an earlier micro-batch may have left one
                self._take(held, tensor)
            held.intake.close()
            self.dispatcher.produced(self._cycle, unit, range(len(held.storage.gradients)))

    def end_backward(self) -> None:
        """Let zeros stand for gradients that did not come, and let go what is still there."""
        self._begin_backward()
        if self._announced is not None:
            self._count(self._announced)
        for index in reversed(range(len(self._units))):
            self._complete(index)
        self._in_backward = False
        self._entered.clear()
        self._enter(self._slots.update)
        for index, left in enumerate(self._left):
            if left:
                self._let_go_unused(index)
        if not self._counts or not self.plan.barrier:
            self.dispatcher.arrive(self._cycle, 2 * self._slots.update + 1)

    def take_waited_s(self) -> float:
        """Return how long the computation has waited for messages since this was last asked."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def make_whole(self) -> set[int]:
        """Drain, and gather whatever the coming forward has not; return what was gathered so."""
        self.dispatcher.drain(self._cycle)
        self._aside.wait_for((m.what, m.unit, m.block) for m in self.plan.messages)
        borrowed: set[int] = set()
        for index, held in enumerate(self._units):
            tasks = self._gathers(index, self._cycle)
            if all(self.dispatcher.is_over(task) for task in tasks):
                continue
            if not held.storage.live:
                borrowed.add(index)
            held.storage.allocate()
            for block in range(len(held.storage.gradients)):
                held.storage.lay_chunks(block)
                self._carriage.gather(index, block).wait()
        return borrowed

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        # A unit that did not run has not waited for its reduction.
        self._require(Task(self._cycle, m) for m in self.plan.of(What.REDUCE))
        self._cycle += 1
        self._in_backward = True
        self._endless |= self._open
        self._open.clear()
        self._left = [len(held.storage.parameters) for held in self._units]
        self._counts = False
        self._complete_ones.clear()
        self._slot = 0
        self._ledger.enter(0)
        self.dispatcher.open_cycle(self._cycle)
        self.dispatcher.arrive(self._cycle, 0)
        if self._announced is not None:
            self._count(self._announced)

    def _count(self, last: bool) -> None:
        """Say of the backward under way whether its gradients are to be reduced."""
        self._announced, self._counts, self._counted = None, last, self._cycle
        if last:
            for held in self._units:
                held.intake.begin()
            self._options = self._updates.options()
        self.dispatcher.count(self._cycle, last=last)

    def _let_go(self, unit: int) -> None:
        zero3 = self.plan.units[unit].sharding is Sharding.ZERO3
        if zero3 or self._counts:
            coming = self._gathers(unit, self._cycle)
            self.dispatcher.unless_begun(coming, self._units[unit].storage.let_go)

    def _let_go_unused(self, unit: int) -> None:
        """Let a unit go whose backward did not run, or not whole, once it is all there."""
        came = self._gathers(unit, self._cycle - 1) + self._regathers(unit, self._cycle)
        self._require(came)
        # It may have been updated meanwhile, from what lay inside what now goes.
        self._aside.wait_for((m.what, m.unit, m.block) for m in self._messages[What.REDUCE, unit])
        self._let_go(unit)

    def _enter(self, slot: int) -> None:
        """Arrive at ``slot`` and wait for what is due there."""
        self._slot = slot
        self._ledger.enter(slot)
        self.dispatcher.arrive(self._cycle, 2 * slot)
        self._require(Task(self._cycle_of(m), m) for m in self._dues[slot])
        self._aside.sweep()

    def _require(self, tasks: Iterable[Task]) -> None:
        wanted, asked_s = list(tasks), time.monotonic()
        self.dispatcher.require(wanted)
        self._waited_s += time.monotonic() - asked_s
        self._aside.wait_for(task.key for task in wanted)

    def _cycle_of(self, message: Message, cycle: int | None = None) -> int:
        """Return where ``message``, due in ``cycle`` (by default this one), has its place."""
        ahead = message.what is What.REGATHER and self._slots.is_forward(message.gate)
        return (self._cycle if cycle is None else cycle) - ahead

    def _gathers(self, unit: int, cycle: int) -> list[Task]:
        """Return what gathers a unit after the backward of ``cycle``."""
        return [Task(cycle, m) for m in self._messages[What.GATHER, unit]]

    def _regathers(self, unit: int, cycle: int) -> list[Task]:
        """Return what gathers a unit again, for the backward of ``cycle``."""
        again = self._messages[What.REGATHER, unit]
        return [Task(self._cycle_of(m, cycle), m) for m in again]

    def _carry(self, task: Task) -> Pending:
        what, unit, block = task.key
        if self.drawing is not None:
            self.drawing.begun(task)
        lane = self._carriage.lane(unit, block)
        if what is What.REDUCE:
            return self._aside.send(task.key, partial(self._carriage.reduce, unit, block), lane)
        storage = self._units[unit].storage
        storage.allocate()  # here: memory belongs to those who compute

        def gather() -> Pending:
            storage.lay_chunks(block)
            return self._carriage.gather(unit, block)

        blocks = range(len(self.plan.units[unit].blocks))
        updated = [(What.REDUCE, unit, b) for b in blocks if b == block or self.plan.whole_layers]
        pending = self._aside.send(task.key, gather, lane, after=updated)
        if storage.is_laid:
            self._aside.give_back([(what, unit, b) for b in blocks], storage.keep_inside)
        return pending

    def _land(self, task: Task) -> bool:
        if self.drawing is not None:
            self.drawing.landed(task)
        if task.message.what is not What.REDUCE:
            return False
        with self._aside.landing(task.key):
            used = self._conclude(task)
        storage = self._units[task.message.unit].storage
        for block in used:
            self._aside.give_back([task.key], partial(storage.drop_gradients, block))
        return bool(used) and not self.plan.barrier

    def _conclude(self, task: Task) -> tuple[int, ...]:
        """Use the sums of a block; return the blocks of its unit whose gradients may go now."""
        _, unit, block = task.key
        if self.plan.barrier:
            return (block,) if self._hold(unit, block) else ()
        arrived = self._arrived[unit]
        arrived.add(block)
        if self.plan.whole_layers and len(arrived) < len(self.plan.units[unit].blocks):
            return ()
        blocks = tuple(sorted(arrived))
        arrived.clear()
        if self._is_sound(task.cycle):
            self._update(unit, blocks)
        return blocks

    def judge(self, *, sound: bool) -> None:
        """Say whether the step whose backward is over may change anything."""
        self._sound_in = {self._cycle: sound}

    def _is_sound(self, cycle: int) -> bool:
        if cycle not in self._sound_in:
            self._sound_in = {cycle: self.sound()}
        return self._sound_in[cycle]

    @torch.no_grad()
    def _update(self, unit: int, blocks: tuple[int, ...]) -> None:
        """Update a unit's blocks right now, on whichever thread this is."""
        storage = self._units[unit].storage
        storage.keep_apart()
        copies = [c for b in blocks for c in self._updates.hand_over(unit, b, 1.0, copy=False)]
        num_bytes = sum(copy.nbytes for copy in copies)
        self._ledger.take("reduced gradients", num_bytes)
        self._updates.step(unit, blocks, self._options)
        self._updates.drop(unit, blocks)
        self._ledger.take("optimizer", self._updates.new_state_bytes(unit))
        self._ledger.take("reduced gradients", -num_bytes)
        if not storage.sharding.is_split:
            for block in blocks:
                storage.lay_chunks(block)

    @torch.no_grad()
    def _hold(self, unit: int, block: int) -> bool:
        """Keep a block's sums for an update that waits for all; say whether as a copy."""
        storage = self._units[unit].storage
        in_place = storage.sharding in (Sharding.DP, Sharding.ZERO1)
        copies = self._updates.hand_over(unit, block, self._weights.total(), copy=not in_place)
        self._ledger.take("reduced gradients", sum(copy.nbytes for copy in copies))
        self._copies += copies
        return bool(copies)

    def release(self) -> None:
        """Let go what was held for the update, which is over, and let gathers begin."""
        for index, held in enumerate(self._units):
            self._updates.drop(index)
            self._ledger.take("optimizer", self._updates.new_state_bytes(index))
            for block in range(len(held.storage.gradients)):
                held.storage.drop_gradients(block)
                if not held.storage.sharding.is_split:
                    held.storage.lay_chunks(block)
        self._ledger.take("reduced gradients", -sum(copy.nbytes for copy in self._copies))
        self._copies = []
        self.dispatcher.updated(self._cycle)
        self.dispatcher.arrive(self._cycle, 2 * self._slots.update + 1)

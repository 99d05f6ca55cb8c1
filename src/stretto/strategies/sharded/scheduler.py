"""Scheduler of the sharded strategy: starts a plan's messages in order, as early as possible.

A message starts when its gate slot has come, its input is ready, and all messages before it have
started. Timing never changes the order, so all ranks start the same messages in the same order.
Completions (update, free) run in that order, too, on one thread. With `Scheduler.inline` each
message completes on the calling thread before the next starts.
"""

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from stretto.comm.transport import Work
from stretto.errors import StrettoError
from stretto.planner.check import describe_message, ready_half_slot
from stretto.planner.plan import MessageKind, Plan, PlanMessage, Sharding
from stretto.strategies.sharded.sharded_unit import ShardedUnit
from stretto.telemetry.timeline import Recorder, Span


class MessageTask(NamedTuple):
    """A message of the plan in one cycle."""

    cycle: int
    message: PlanMessage

    @property
    def key(self) -> tuple[MessageKind, int, int]:
        """Kind, unit and block; equal in all cycles."""
        return self.message.what, self.message.unit, self.message.block


class PlanTasks:
    """Looks up the tasks of a plan by unit, or by the slot in which they are due."""

    def __init__(self, plan: Plan) -> None:
        self._slots = plan.slots
        self._due: dict[int, list[PlanMessage]] = defaultdict(list)
        self._of_unit: dict[tuple[MessageKind, int], list[PlanMessage]] = defaultdict(list)
        for message in plan.messages:
            self._due[message.due].append(message)
            self._of_unit[message.what, message.unit].append(message)

    def has_due(self, slot: int) -> bool:
        """Return whether any message is due in ``slot``."""
        return bool(self._due[slot])

    def due_in(self, slot: int, cycle: int) -> list[MessageTask]:
        """Return the tasks that are due in ``slot`` of ``cycle``."""
        return [MessageTask(self._gate_cycle(m, cycle), m) for m in self._due[slot]]

    def unshards(self, unit: int, cycle: int) -> list[MessageTask]:
        """Return the tasks that unshard a unit after the backward of ``cycle``."""
        return [MessageTask(cycle, m) for m in self._of_unit[MessageKind.UNSHARD, unit]]

    def backward_unshards(self, unit: int, cycle: int) -> list[MessageTask]:
        """Return the tasks that unshard a unit again for the backward of ``cycle``."""
        messages = self._of_unit[MessageKind.UNSHARD_FOR_BACKWARD, unit]
        return [MessageTask(self._gate_cycle(m, cycle), m) for m in messages]

    def reduction_keys(self, unit: int) -> list[tuple[MessageKind, int, int]]:
        """Return the keys of the reductions of a unit."""
        return [(m.what, m.unit, m.block) for m in self._of_unit[MessageKind.REDUCE, unit]]

    def _gate_cycle(self, message: PlanMessage, cycle: int) -> int:
        """Return the cycle to which ``message`` belongs if it is due in ``cycle``.

        A message that backward needs, but whose gate is in forward, belongs to the cycle before.
        """
        ahead = message.what is MessageKind.UNSHARD_FOR_BACKWARD and self._slots.is_forward(
            message.gate
        )
        return cycle - ahead


class MessageCallbacks(NamedTuple):
    """What the scheduler calls for each message."""

    start: Callable[[MessageTask], Work]
    """Start the message and return its work."""
    on_complete: Callable[[MessageTask], bool]
    """Handle the completed message; return whether parameters are up to date because of it."""


class Scheduler:
    """Keeps the queue of messages and the position of this rank's computation."""

    def __init__(self, plan: Plan, callbacks: MessageCallbacks) -> None:
        self._plan, self._callbacks = plan, callbacks
        self.inline = False
        """Whether each message completes on the caller's thread before the next starts."""
        self._cycle_length = 2 * plan.slots.count
        self._changed = threading.Condition()
        self._queue: deque[MessageTask] = deque()
        self._position = -self._cycle_length
        self._ends_step_by_cycle: dict[int, bool] = {-1: False}
        self._ready_gradients: set[tuple[int, int, int]] = set()
        self._updated_cycles: dict[tuple[int, int], int] = {}
        self._started_cycles: dict[tuple[MessageKind, int, int], int] = {}
        self._completed_cycles: dict[tuple[MessageKind, int, int], int] = {}
        self._forced_tasks: set[MessageTask] = set()
        self._failure: BaseException | None = None
        self._in_flight: queue.SimpleQueue[tuple[MessageTask, Work] | None] = queue.SimpleQueue()
        self._num_in_flight = 0
        self._thread: threading.Thread | None = None

    def open_cycle(self, cycle: int) -> None:
        """Queue the messages of ``cycle``; for cycle -1 only those that the first forward needs."""
        slots = self._plan.slots
        with self._changed:
            for message in self._plan.messages:
                is_for_first_forward = message.what is MessageKind.UNSHARD or slots.is_forward(
                    message.gate
                )
                if cycle >= 0 or (is_for_first_forward and self._is_freed(message.unit)):
                    self._queue.append(MessageTask(cycle, message))

    def _is_freed(self, unit: int) -> bool:
        return self._plan.units[unit].sharding.shards_parameters

    def declare_backward(self, cycle: int, *, last: bool) -> None:
        """Set whether the backward of ``cycle`` ends a step."""
        with self._changed:
            self._ends_step_by_cycle = {
                c: was for c, was in self._ends_step_by_cycle.items() if c >= cycle - 1
            }
            self._ends_step_by_cycle[cycle] = last
            self._start_ready()

    def advance_to(self, cycle: int, half_slot: int) -> None:
        """Move this rank's position to ``half_slot`` of ``cycle``; two half slots make a slot."""
        with self._changed:
            self._position = max(self._position, cycle * self._cycle_length + half_slot)
            self._start_ready()

    def mark_gradients_ready(self, cycle: int, unit: int, blocks: Iterable[int]) -> None:
        """Mark the gradients of some blocks as ready to be reduced."""
        with self._changed:
            self._ready_gradients.update((cycle, unit, block) for block in blocks)
            self._start_ready()

    def updated(self, cycle: int) -> None:
        """Mark all parameters as updated in ``cycle``, by an update after the barrier."""
        with self._changed:
            for index, unit in enumerate(self._plan.units):
                for block in range(len(unit.blocks)):
                    self._updated_cycles[index, block] = cycle
            self._start_ready()

    def wait_for_tasks(self, tasks: Iterable[MessageTask]) -> None:
        """Return when ``tasks`` are complete; messages before them in the queue start first.

        Raises:
            StrettoError: A message before them waits for this thread: there would be a deadlock.
        """
        with self._changed:
            needed = [
                task for task in tasks if self._is_needed(task) and not self._is_complete(task)
            ]
            for task in needed:
                if not self._has_started(task):
                    self._raise_if_deadlocked(task)
            self._changed.wait_for(
                lambda: self._failure is not None or all(self._is_complete(task) for task in needed)
            )
            if self._failure is not None:
                raise self._failure

    def drain(self, cycle: int) -> None:
        """Return when all reductions up to ``cycle`` are complete and no message is in flight.

        Messages before them in the queue start now, even if their gate has not come.
        """
        with self._changed:
            waiting = list(self._queue)
            last = max(
                (i for i, task in enumerate(waiting) if task.message.what is MessageKind.REDUCE),
                default=-1,
            )
            self._forced_tasks = set(waiting[: last + 1])
            self._start_ready()
        self.wait_for_tasks(
            MessageTask(cycle, m) for m in self._plan.messages_of(MessageKind.REDUCE)
        )
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._num_in_flight)
            self._forced_tasks = set()
            if self._failure is not None:
                raise self._failure

    def is_complete(self, task: MessageTask) -> bool:
        """Return whether a message is complete, in its cycle or a later one."""
        with self._changed:
            return self._is_complete(task)

    def call_unless_started(self, tasks: Iterable[MessageTask], action: Callable[[], None]) -> None:
        """Call ``action`` if none of ``tasks`` has started; none can start meanwhile."""
        with self._changed:
            if not any(self._has_started(task) for task in tasks):
                action()

    def close(self) -> None:
        """End the completion thread."""
        if self._thread is not None:
            self._in_flight.put(None)
            self._thread.join()
            self._thread = None

    def _is_needed(self, task: MessageTask) -> bool:
        """Return whether a message is needed in its cycle, which may only accumulate gradients."""
        if task.message.what is MessageKind.UNSHARD_FOR_BACKWARD:
            return True
        if self._ends_step_by_cycle.get(task.cycle, False):
            return True
        zero3 = self._plan.units[task.message.unit].sharding is Sharding.ZERO3
        first = task.cycle < 0 and self._is_freed(task.message.unit)
        return task.message.what is MessageKind.UNSHARD and (zero3 or first)

    def _is_early(self, task: MessageTask) -> bool:
        if task in self._forced_tasks:
            return False
        return self._position < task.cycle * self._cycle_length + ready_half_slot(
            self._plan, task.message
        )

    def _has_started(self, task: MessageTask) -> bool:
        return self._started_cycles.get(task.key, -2) >= task.cycle

    def _is_complete(self, task: MessageTask) -> bool:
        return self._completed_cycles.get(task.key, -2) >= task.cycle

    def _can_start(self, task: MessageTask) -> bool:
        cycle, message = task
        if (
            message.what is not MessageKind.UNSHARD_FOR_BACKWARD
            and cycle not in self._ends_step_by_cycle
        ):
            return False
        if self._is_early(task):
            return False
        if not self._ends_step_by_cycle.get(cycle, False):
            return True
        if message.what is MessageKind.REDUCE:
            return (cycle, message.unit, message.block) in self._ready_gradients
        if message.what is MessageKind.UNSHARD:
            return self._updated_cycles.get((message.unit, message.block), -1) >= cycle
        return True

    def _start_ready(self) -> None:
        """Start messages from the head of the queue while they can start; needs the lock."""
        while self._queue and self._failure is None:
            task = self._queue[0]
            if task.cycle in self._ends_step_by_cycle and not self._is_needed(task):
                self._queue.popleft()
                continue
            if not self._can_start(task):
                return
            self._queue.popleft()
            self._start(task)

    def _start(self, task: MessageTask) -> None:
        self._started_cycles[task.key] = task.cycle
        work = self._callbacks.start(task)
        if self.inline:
            work.wait()
            self._record_completion(task, self._callbacks.on_complete(task))
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_completions, name="completions", daemon=True
            )
            self._thread.start()
        self._num_in_flight += 1
        self._in_flight.put((task, work))

    def _run_completions(self) -> None:
        while (entry := self._in_flight.get()) is not None:
            task, work = entry
            try:
                work.wait()
                updated = self._callbacks.on_complete(task)
                with self._changed:
                    self._num_in_flight -= 1
                    self._record_completion(task, updated)
                    self._start_ready()  # may fail, too: for lack of memory, say
                    self._changed.notify_all()
            except BaseException as failure:  # noqa: BLE001 - raised where it is waited for
                with self._changed:
                    self._failure = self._failure or failure
                    self._changed.notify_all()

    def _record_completion(self, task: MessageTask, updated: bool) -> None:
        self._completed_cycles[task.key] = task.cycle
        _, unit, block = task.key
        if task.message.what is not MessageKind.REDUCE:
            return
        self._ready_gradients.discard((task.cycle, unit, block))
        if updated and not self._plan.barrier:
            updated_blocks = (
                range(len(self._plan.units[unit].blocks)) if self._plan.whole_layers else (block,)
            )
            for updated_block in updated_blocks:
                self._updated_cycles[unit, updated_block] = task.cycle

    def _raise_if_deadlocked(self, needed: MessageTask) -> None:
        """Raise if a message before ``needed`` in the queue waits for the calling thread."""
        for task in self._queue:
            cycle, message = task
            is_early = self._is_early(task)
            lacks_gradients = (
                message.what is MessageKind.REDUCE
                and self._ends_step_by_cycle.get(cycle, False)
                and (cycle, message.unit, message.block) not in self._ready_gradients
            )
            if self._is_needed(task) and (is_early or lacks_gradients):
                raise StrettoError(
                    f"the {describe_message(self._plan, needed.message)} is needed now, but stands "
                    f"behind the {describe_message(self._plan, message)}, which cannot begin yet: "
                    "the model does not run its units in the order of the plan; name them in that "
                    'order, or take strategy.plan = "dear"'
                )
            if task == needed:
                return


class MessageTimeline:
    """Records the messages of a plan as spans in the run's timeline."""

    def __init__(self, plan: Plan, units: Sequence[ShardedUnit], recorder: Recorder) -> None:
        self._plan, self._units, self._recorder = plan, units, recorder
        self._started_s: dict[MessageTask, float] = {}
        self._completed_s = 0.0
        self.step = 0
        """The step that completed messages are recorded for."""

    def on_start(self, task: MessageTask) -> None:
        """Record the start; the next cycle's message may start before this one completes."""
        self._started_s[task] = time.monotonic()

    def on_complete(self, task: MessageTask) -> None:
        """Add a span that begins when the message started or the one before it completed."""
        what, unit, block = task.key
        ended_s = time.monotonic()
        started_s = min(max(self._started_s.pop(task), self._completed_s), ended_s)
        self._completed_s = ended_s
        name = f"{what} {self._plan.units[unit].name}"
        num_bytes = self._num_bytes(what, unit, block)
        self._recorder.add(Span(name, "comm 0", started_s, ended_s, self.step, num_bytes))

    def _num_bytes(self, what: MessageKind, unit: int, block: int) -> int:
        sharded_unit = self._units[unit]
        if what is MessageKind.REDUCE:
            return sharded_unit.gradients[block].nbytes
        return sharded_unit.layout.blocks[block].numel * sharded_unit.flat.element_size()

"""Begins the messages of a plan, strictly in its order, as early as gates and inputs allow.

Nothing is reordered by circumstance: a message begins when its slot has come, what it carries is
there, and all before it have begun; so all ranks begin the same messages in the same order. What
is to be done when one is over (update, let go) is done in that order, too, by a thread of its own,
or right away where somebody wants messages to take no time.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from stretto.comm.channel import Pending
from stretto.errors import StrettoError
from stretto.plan.check import describe, ready_moment
from stretto.plan.value import Message, Plan, Sharding, What


class Task(NamedTuple):
    """A message of one cycle."""

    cycle: int
    message: Message

    @property
    def key(self) -> tuple[What, int, int]:
        """What it is, whichever the cycle."""
        return self.message.what, self.message.unit, self.message.block


class Work(NamedTuple):
    """What the dispatcher lets others do."""

    carry: Callable[[Task], Pending]
    """Begin a message."""
    land: Callable[[Task], bool]
    """Do what follows when one is over; returns whether parameters are up to date by it."""


class Dispatcher:
    """The order of messages, and how far this rank has come."""

    def __init__(self, plan: Plan, work: Work) -> None:
        self._plan, self._work = plan, work
        self.inline = False
        """Whether a message is over before the next may begin, on the caller's thread."""
        self._length = 2 * plan.slots.count
        self._changed = threading.Condition()
        self._waiting: deque[Task] = deque()
        self._moment = -self._length
        self._counts: dict[int, bool] = {-1: False}
        self._produced: set[tuple[int, int, int]] = set()
        self._updated: dict[tuple[int, int], int] = {}
        self._begun: dict[tuple[What, int, int], int] = {}
        self._landed: dict[tuple[What, int, int], int] = {}
        self._pulled: set[Task] = set()
        self._failure: BaseException | None = None
        self._under_way: queue.SimpleQueue[tuple[Task, Pending] | None] = queue.SimpleQueue()
        self._num_under_way = 0
        self._thread: threading.Thread | None = None

    def open_cycle(self, cycle: int) -> None:
        """Line up the messages of ``cycle``; before the first, only what forward needs."""
        slots = self._plan.slots
        with self._changed:
            for message in self._plan.messages:
                starts = message.what is What.GATHER or slots.is_forward(message.gate)
                if cycle >= 0 or (starts and self._is_freed(message.unit)):
                    self._waiting.append(Task(cycle, message))

    def _is_freed(self, unit: int) -> bool:
        return self._plan.units[unit].sharding.is_freed

    def count(self, cycle: int, *, last: bool) -> None:
        """Say whether the backward of ``cycle`` ends a step."""
        with self._changed:
            self._counts = {c: was for c, was in self._counts.items() if c >= cycle - 1}
            self._counts[cycle] = last
            self._pump()

    def arrive(self, cycle: int, half_slot: int) -> None:
        """Note how far this rank's computation has come."""
        with self._changed:
            self._moment = max(self._moment, cycle * self._length + half_slot)
            self._pump()

    def produced(self, cycle: int, unit: int, blocks: Iterable[int]) -> None:
        """Note that gradients are ready to leave."""
        with self._changed:
            self._produced.update((cycle, unit, block) for block in blocks)
            self._pump()

    def updated(self, cycle: int) -> None:
        """Note that all parameters are up to date, their gradients having been read first."""
        with self._changed:
            for index, unit in enumerate(self._plan.units):
                for block in range(len(unit.blocks)):
                    self._updated[index, block] = cycle
            self._pump()

    def require(self, tasks: Iterable[Task]) -> None:
        """Return when ``tasks`` are over; whatever stands before them goes first."""
        with self._changed:
            wanted = [task for task in tasks if self._applies(task) and not self._is_over(task)]
            for task in wanted:
                if not self._has_begun(task):
                    self._refuse_to_wait_in_vain(task)
            self._changed.wait_for(
                lambda: self._failure is not None or all(self._is_over(task) for task in wanted)
            )
            if self._failure is not None:
                raise self._failure

    def drain(self, cycle: int) -> None:
        """Return when all reductions up to ``cycle`` are over, and nothing is under way.

        What stands before them begins, too, whatever its gate says.
        """
        with self._changed:
            waiting = list(self._waiting)
            last = max(
                (i for i, task in enumerate(waiting) if task.message.what is What.REDUCE),
                default=-1,
            )
            self._pulled = set(waiting[: last + 1])
            self._pump()
        self.require(Task(cycle, m) for m in self._plan.of(What.REDUCE))
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._num_under_way)
            self._pulled = set()
            if self._failure is not None:
                raise self._failure

    def is_over(self, task: Task) -> bool:
        """Say whether a message has begun and ended, in its cycle or later."""
        with self._changed:
            return self._is_over(task)

    def unless_begun(self, tasks: Iterable[Task], act: Callable[[], None]) -> None:
        """Call ``act`` before any of ``tasks`` can begin, if none has."""
        with self._changed:
            if not any(self._has_begun(task) for task in tasks):
                act()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._under_way.put(None)
            self._thread.join()
            self._thread = None

    def _applies(self, task: Task) -> bool:
        """Say whether a message is needed in a cycle whose backward may not end a step."""
        if task.message.what is What.REGATHER:
            return True
        if self._counts.get(task.cycle, False):
            return True
        zero3 = self._plan.units[task.message.unit].sharding is Sharding.ZERO3
        first = task.cycle < 0 and self._is_freed(task.message.unit)
        return task.message.what is What.GATHER and (zero3 or first)

    def _is_early(self, task: Task) -> bool:
        if task in self._pulled:
            return False
        return self._moment < task.cycle * self._length + ready_moment(self._plan, task.message)

    def _has_begun(self, task: Task) -> bool:
        return self._begun.get(task.key, -2) >= task.cycle

    def _is_over(self, task: Task) -> bool:
        return self._landed.get(task.key, -2) >= task.cycle

    def _may_begin(self, task: Task) -> bool:
        cycle, message = task
        if message.what is not What.REGATHER and cycle not in self._counts:
            return False
        if self._is_early(task):
            return False
        if not self._counts.get(cycle, False):
            return True
        if message.what is What.REDUCE:
            return (cycle, message.unit, message.block) in self._produced
        if message.what is What.GATHER:
            return self._updated.get((message.unit, message.block), -1) >= cycle
        return True

    def _pump(self) -> None:
        """Begin what may begin, the lock held."""
        while self._waiting and self._failure is None:
            task = self._waiting[0]
            if task.cycle in self._counts and not self._applies(task):
                self._waiting.popleft()
                continue
            if not self._may_begin(task):
                return
            self._waiting.popleft()
            self._begin(task)

    def _begin(self, task: Task) -> None:
        self._begun[task.key] = task.cycle
        pending = self._work.carry(task)
        if self.inline:
            pending.wait()
            self._note(task, self._work.land(task))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._finish, name="landings", daemon=True)
            self._thread.start()
        self._num_under_way += 1
        self._under_way.put((task, pending))

    def _finish(self) -> None:
        while (entry := self._under_way.get()) is not None:
            task, pending = entry
            try:
                pending.wait()
                updated = self._work.land(task)
                with self._changed:
                    self._num_under_way -= 1
                    self._note(task, updated)
                    self._pump()  # what begins here may fail, too: for want of memory, say
                    self._changed.notify_all()
            except BaseException as failure:  # noqa: BLE001 - raised where it is waited for
                with self._changed:
                    self._failure = self._failure or failure
                    self._changed.notify_all()

    def _note(self, task: Task, updated: bool) -> None:
        self._landed[task.key] = task.cycle
        _, unit, block = task.key
        if task.message.what is not What.REDUCE:
            return
        self._produced.discard((task.cycle, unit, block))
        if updated and not self._plan.barrier:
            whole = (
                range(len(self._plan.units[unit].blocks)) if self._plan.whole_layers else (block,)
            )
            for one in whole:
                self._updated[unit, one] = task.cycle

    def _refuse_to_wait_in_vain(self, wanted: Task) -> None:
        """Say who is out of order, where what stands before ``wanted`` waits for this thread."""
        for task in self._waiting:
            cycle, message = task
            early = self._is_early(task)
            unmade = (
                message.what is What.REDUCE
                and self._counts.get(cycle, False)
                and (cycle, message.unit, message.block) not in self._produced
            )
            if self._applies(task) and (early or unmade):
                raise StrettoError(
                    f"the {describe(self._plan, wanted.message)} is needed now, but stands behind "
                    f"the {describe(self._plan, message)}, which cannot begin yet: the model does "
                    "not run its units in the order of the plan; name them in that order, or take "
                    'strategy.plan = "dear"'
                )
            if task == wanted:
                return

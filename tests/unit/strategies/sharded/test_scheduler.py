"""Messages start in the order of the plan, not before their gates; failures reach the waiter."""

import threading

import pytest

from stretto.errors import StrettoError, TransportError
from stretto.planner.check import check
from stretto.planner.plan import MessageKind
from stretto.planner.presets import PresetOptions, UnitShape, preset_plan
from stretto.strategies.sharded.scheduler import MessageCallbacks, MessageTask, Scheduler

REDUCE, UNSHARD = MessageKind.REDUCE, MessageKind.UNSHARD
SHAPES = (UnitShape("a", 8), UnitShape("b", 8))
"""Slots of the cycle: b1, b0, update, f0, f1."""


class ManualWork:
    """Work that finishes, or fails, when the test sets ``over``."""

    def __init__(self):
        self.over = threading.Event()
        self.failure = None
        self.finished_s = None

    def wait(self):
        assert self.over.wait(10)
        if self.failure is not None:
            raise self.failure


class Journal:
    """Records the order of starts and completions."""

    def __init__(self, *, at_once=True):
        self.started, self.completed = [], []
        self.handle = {}
        self._at_once = at_once

    def start(self, task):
        self.started.append(name(task))
        self.handle[name(task)] = handle = ManualWork()
        if self._at_once:
            handle.over.set()
        return handle

    def on_complete(self, task):
        self.completed.append(name(task))
        return task.message.what is REDUCE


def name(task):
    return f"{task.cycle} {task.message.what} {'ab'[task.message.unit]}"


def task_of(plan, cycle, what, unit):
    return MessageTask(cycle, next(m for m in plan.messages_of(what) if m.unit == unit))


@pytest.fixture
def make_scheduler():
    made = []

    def make(plan, journal, *, inline=True):
        check(plan)
        scheduler = Scheduler(plan, MessageCallbacks(journal.start, journal.on_complete))
        scheduler.inline = inline
        made.append((scheduler, journal))
        return scheduler

    yield make
    for scheduler, journal in made:
        for handle in journal.handle.values():
            handle.over.set()
        scheduler.close()


def first_forward(scheduler):
    scheduler.open_cycle(-1)
    for moment in range(4, 10):
        scheduler.advance_to(-1, moment)


def backward(scheduler, cycle, *, last=True):
    """Go through the backward of ``cycle`` to the end of its update."""
    scheduler.open_cycle(cycle)
    scheduler.declare_backward(cycle, last=last)
    for slot, unit in [(0, 1), (1, 0)]:
        scheduler.advance_to(cycle, 2 * slot)
        scheduler.mark_gradients_ready(cycle, unit, [0])
        scheduler.advance_to(cycle, 2 * slot + 1)
    scheduler.advance_to(cycle, 4)
    scheduler.advance_to(cycle, 5)


def test_messages_start_in_the_order_of_the_plan(make_scheduler):
    plan, journal = preset_plan("zero3", SHAPES, PresetOptions(prefetch=0)), Journal()
    scheduler = make_scheduler(plan, journal)
    first_forward(scheduler)
    backward(scheduler, 0)
    assert journal.started == [
        *("-1 unshard a", "-1 unshard b"),
        *("0 reduce b", "0 unshard_for_backward a", "0 reduce a"),
    ]
    scheduler.advance_to(0, 6)
    scheduler.advance_to(0, 8)
    assert journal.started[-2:] == ["0 unshard a", "0 unshard b"]
    assert journal.completed == journal.started


def test_a_message_waits_for_its_gate_even_if_its_input_is_ready(make_scheduler):
    plan, journal = preset_plan("zero2", SHAPES, PresetOptions(prefetch=0)), Journal()
    scheduler = make_scheduler(plan, journal)
    scheduler.open_cycle(-1)
    scheduler.advance_to(-1, 5)
    assert journal.started == []
    scheduler.advance_to(-1, 6)
    assert journal.started == ["-1 unshard a"]
    scheduler.advance_to(-1, 8)
    assert journal.started == ["-1 unshard a", "-1 unshard b"]


def test_no_message_overtakes_one_whose_input_is_not_ready(make_scheduler):
    plan, journal = preset_plan("dear", SHAPES), Journal()
    scheduler = make_scheduler(plan, journal)
    scheduler.open_cycle(0)
    scheduler.declare_backward(0, last=True)
    scheduler.advance_to(0, 5)
    scheduler.mark_gradients_ready(0, 0, [0])  # a's gradients are ready, b's stand before them
    assert journal.started == []
    scheduler.mark_gradients_ready(0, 1, [0])
    assert journal.started == ["0 reduce b", "0 reduce a", "0 unshard a", "0 unshard b"]


def test_an_unshard_waits_for_the_update_after_its_reduction(make_scheduler):
    plan, journal = preset_plan("dear", SHAPES), Journal(at_once=False)
    scheduler = make_scheduler(plan, journal, inline=False)
    backward(scheduler, 0)
    assert journal.started == ["0 reduce b", "0 reduce a"]
    journal.handle["0 reduce b"].over.set()
    journal.handle["0 reduce a"].over.set()
    scheduler.wait_for_tasks([task_of(plan, 0, REDUCE, 0)])
    journal.handle["0 unshard a"].over.set()
    scheduler.wait_for_tasks([task_of(plan, 0, UNSHARD, 0)])
    assert journal.completed == ["0 reduce b", "0 reduce a", "0 unshard a"]
    assert scheduler.is_complete(task_of(plan, 0, UNSHARD, 0))
    assert not scheduler.is_complete(task_of(plan, 0, UNSHARD, 1))


def test_with_a_barrier_unshards_wait_for_updated(make_scheduler):
    plan, journal = preset_plan("dear", SHAPES, PresetOptions(barrier=True)), Journal()
    scheduler = make_scheduler(plan, journal)
    backward(scheduler, 0)
    assert journal.started == ["0 reduce b", "0 reduce a"]
    scheduler.updated(0)
    assert journal.started[2:] == ["0 unshard a", "0 unshard b"]


def test_a_backward_that_only_accumulates_unshards_resharded_units_only(make_scheduler):
    plan, journal = preset_plan("zero3", SHAPES, PresetOptions(prefetch=0)), Journal()
    scheduler = make_scheduler(plan, journal)
    first_forward(scheduler)
    backward(scheduler, 0, last=False)
    scheduler.advance_to(0, 9)
    # b is zero2 and still whole; a was resharded after its backward.
    assert journal.started[2:] == ["0 unshard_for_backward a", "0 unshard a"]


def test_an_action_runs_only_before_its_message_starts(make_scheduler):
    plan, journal = preset_plan("zero2", SHAPES), Journal()
    scheduler = make_scheduler(plan, journal)
    calls = []
    tasks = [task_of(plan, -1, UNSHARD, 0)]
    scheduler.call_unless_started(tasks, lambda: calls.append("before"))
    first_forward(scheduler)
    scheduler.call_unless_started(tasks, lambda: calls.append("after"))
    assert calls == ["before"]


@pytest.mark.parametrize("where", ["wait", "on_complete"])
def test_a_failure_is_raised_where_it_is_waited_for(where, make_scheduler):
    plan, journal = preset_plan("dear", SHAPES), Journal(at_once=False)
    lost = TransportError("rank 1 is gone")

    def on_complete(task):
        raise lost

    if where == "on_complete":
        journal.on_complete = on_complete
    scheduler = make_scheduler(plan, journal, inline=False)
    backward(scheduler, 0)
    journal.handle["0 reduce b"].failure = lost if where == "wait" else None
    journal.handle["0 reduce b"].over.set()
    with pytest.raises(TransportError, match="rank 1 is gone"):
        scheduler.wait_for_tasks([task_of(plan, 0, REDUCE, 1)])
    with pytest.raises(TransportError, match="rank 1 is gone"):
        scheduler.drain(0)
    scheduler.advance_to(0, 9)
    assert journal.started == ["0 reduce b", "0 reduce a"], "nothing begins after a failure"


def test_a_wait_that_only_this_thread_could_end_is_refused(make_scheduler):
    plan, journal = preset_plan("zero2", SHAPES, PresetOptions(prefetch=0)), Journal()
    scheduler = make_scheduler(plan, journal)
    scheduler.open_cycle(-1)
    scheduler.advance_to(-1, 6)
    # b runs before a: its gate has not come.
    with pytest.raises(
        StrettoError, match=r"the unshard of unit 1 \(b\) is needed now, but .*dear"
    ):
        scheduler.wait_for_tasks([task_of(plan, -1, UNSHARD, 1)])


def test_to_wait_behind_a_reduction_without_gradients_is_refused(make_scheduler):
    plan, journal = preset_plan("dear", SHAPES), Journal()
    scheduler = make_scheduler(plan, journal)
    scheduler.open_cycle(0)
    scheduler.declare_backward(0, last=True)
    scheduler.advance_to(0, 6)
    scheduler.mark_gradients_ready(0, 0, [0])
    reason = r"reduce of unit 0 \(a\) is needed now, but stands behind the reduce of unit 1 \(b\)"
    with pytest.raises(StrettoError, match=reason):
        scheduler.wait_for_tasks([task_of(plan, 0, REDUCE, 0)])


def test_a_drain_starts_reductions_before_their_gates_and_no_more(make_scheduler):
    plan = preset_plan("zero2", SHAPES, PresetOptions(prefetch=0))
    late = plan.messages[1].model_copy(update={"gate": 3})
    plan = plan.replace(messages=(plan.messages[0], late, *plan.messages[2:]))
    journal = Journal()
    scheduler = make_scheduler(plan, journal, inline=False)
    first_forward(scheduler)
    backward(scheduler, 0)
    assert journal.started[2:] == ["0 reduce b"]
    scheduler.drain(0)
    assert journal.completed[2:] == ["0 reduce b", "0 reduce a"]


def test_completions_run_in_the_order_of_the_starts(make_scheduler):
    plan, journal = preset_plan("dear", SHAPES), Journal(at_once=False)
    scheduler = make_scheduler(plan, journal, inline=False)
    backward(scheduler, 0)
    journal.handle["0 reduce a"].over.set()  # the second one is over first
    assert journal.completed == []
    journal.handle["0 reduce b"].over.set()
    scheduler.wait_for_tasks([task_of(plan, 0, REDUCE, 0)])
    assert journal.completed[:2] == ["0 reduce b", "0 reduce a"]


def test_a_start_that_fails_after_a_completion_is_raised_where_it_is_waited_for(make_scheduler):
    plan, journal = preset_plan("dear", SHAPES), Journal(at_once=False)
    begin = journal.start

    def start(task):
        if task.message.what is UNSHARD:
            raise TransportError("no memory")
        return begin(task)

    journal.start = start
    scheduler = make_scheduler(plan, journal, inline=False)
    backward(scheduler, 0)
    for handle in journal.handle.values():
        handle.over.set()
    with pytest.raises(TransportError, match="no memory"):
        scheduler.wait_for_tasks([task_of(plan, 0, UNSHARD, 0)])

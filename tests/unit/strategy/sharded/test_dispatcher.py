"""Messages begin in the order of the plan, not before their gates, and fail where waited for."""

import threading

import pytest

from stretto.errors import ChannelError, StrettoError
from stretto.plan.check import check
from stretto.plan.presets import Shape, Wish, named_plan
from stretto.plan.value import What
from stretto.strategy.sharded.dispatcher import Dispatcher, Task, Work

REDUCE, GATHER, REGATHER = What.REDUCE, What.GATHER, What.REGATHER
SHAPES = (Shape("a", 8), Shape("b", 8))
"""Slots of the cycle: b1, b0, update, f0, f1."""


class Travelling:
    """A message that is over when somebody says so, or fails."""

    def __init__(self):
        self.over = threading.Event()
        self.failure = None
        self.finished_s = None

    def wait(self):
        assert self.over.wait(10)
        if self.failure is not None:
            raise self.failure


class Journal:
    """Notes what was begun and what has landed."""

    def __init__(self, *, at_once=True):
        self.begun, self.landed = [], []
        self.pending = {}
        self._at_once = at_once

    def carry(self, task):
        self.begun.append(name(task))
        self.pending[name(task)] = pending = Travelling()
        if self._at_once:
            pending.over.set()
        return pending

    def land(self, task):
        self.landed.append(name(task))
        return task.message.what is REDUCE


def name(task):
    return f"{task.cycle} {task.message.what} {'ab'[task.message.unit]}"


def task_of(plan, cycle, what, unit):
    return Task(cycle, next(m for m in plan.of(what) if m.unit == unit))


@pytest.fixture
def dispatched():
    made = []

    def make(plan, journal, *, inline=True):
        check(plan)
        dispatcher = Dispatcher(plan, Work(journal.carry, journal.land))
        dispatcher.inline = inline
        made.append((dispatcher, journal))
        return dispatcher

    yield make
    for dispatcher, journal in made:
        for pending in journal.pending.values():
            pending.over.set()
        dispatcher.close()


def first_forward(dispatcher):
    dispatcher.open_cycle(-1)
    for moment in range(4, 10):
        dispatcher.arrive(-1, moment)


def backward(dispatcher, cycle, *, last=True):
    """Go through the backward of ``cycle`` to the end of its update."""
    dispatcher.open_cycle(cycle)
    dispatcher.count(cycle, last=last)
    for slot, unit in [(0, 1), (1, 0)]:
        dispatcher.arrive(cycle, 2 * slot)
        dispatcher.produced(cycle, unit, [0])
        dispatcher.arrive(cycle, 2 * slot + 1)
    dispatcher.arrive(cycle, 4)
    dispatcher.arrive(cycle, 5)


def test_messages_begin_in_the_order_of_the_plan(dispatched):
    plan, journal = named_plan("zero3", SHAPES, Wish(prefetch=0)), Journal()
    dispatcher = dispatched(plan, journal)
    first_forward(dispatcher)
    backward(dispatcher, 0)
    assert journal.begun == [
        *("-1 gather a", "-1 gather b"),
        *("0 reduce b", "0 regather a", "0 reduce a"),
    ]
    dispatcher.arrive(0, 6)
    dispatcher.arrive(0, 8)
    assert journal.begun[-2:] == ["0 gather a", "0 gather b"]
    assert journal.landed == journal.begun


def test_a_gate_is_kept_even_where_everything_is_ready(dispatched):
    plan, journal = named_plan("zero2", SHAPES, Wish(prefetch=0)), Journal()
    dispatcher = dispatched(plan, journal)
    dispatcher.open_cycle(-1)
    dispatcher.arrive(-1, 5)
    assert journal.begun == []
    dispatcher.arrive(-1, 6)
    assert journal.begun == ["-1 gather a"]
    dispatcher.arrive(-1, 8)
    assert journal.begun == ["-1 gather a", "-1 gather b"]


def test_nothing_overtakes_a_message_whose_input_is_not_there(dispatched):
    plan, journal = named_plan("dear", SHAPES), Journal()
    dispatcher = dispatched(plan, journal)
    dispatcher.open_cycle(0)
    dispatcher.count(0, last=True)
    dispatcher.arrive(0, 5)
    dispatcher.produced(0, 0, [0])  # a's gradients are ready, b's stand before them
    assert journal.begun == []
    dispatcher.produced(0, 1, [0])
    assert journal.begun == ["0 reduce b", "0 reduce a", "0 gather a", "0 gather b"]


def test_a_gather_waits_for_the_update_that_follows_its_reduction(dispatched):
    plan, journal = named_plan("dear", SHAPES), Journal(at_once=False)
    dispatcher = dispatched(plan, journal, inline=False)
    backward(dispatcher, 0)
    assert journal.begun == ["0 reduce b", "0 reduce a"]
    journal.pending["0 reduce b"].over.set()
    journal.pending["0 reduce a"].over.set()
    dispatcher.require([task_of(plan, 0, REDUCE, 0)])
    journal.pending["0 gather a"].over.set()
    dispatcher.require([task_of(plan, 0, GATHER, 0)])
    assert journal.landed == ["0 reduce b", "0 reduce a", "0 gather a"]
    assert dispatcher.is_over(task_of(plan, 0, GATHER, 0))
    assert not dispatcher.is_over(task_of(plan, 0, GATHER, 1))


def test_with_a_barrier_gathers_wait_until_somebody_has_updated(dispatched):
    plan, journal = named_plan("dear", SHAPES, Wish(barrier=True)), Journal()
    dispatcher = dispatched(plan, journal)
    backward(dispatcher, 0)
    assert journal.begun == ["0 reduce b", "0 reduce a"]
    dispatcher.updated(0)
    assert journal.begun[2:] == ["0 gather a", "0 gather b"]


def test_a_backward_that_only_accumulates_sends_nothing_but_what_is_let_go(dispatched):
    plan, journal = named_plan("zero3", SHAPES, Wish(prefetch=0)), Journal()
    dispatcher = dispatched(plan, journal)
    first_forward(dispatcher)
    backward(dispatcher, 0, last=False)
    dispatcher.arrive(0, 9)
    # b is zero2 and still whole; a was let go after its backward.
    assert journal.begun[2:] == ["0 regather a", "0 gather a"]


def test_what_has_not_been_let_go_is_asked_before_its_gather_begins(dispatched):
    plan, journal = named_plan("zero2", SHAPES), Journal()
    dispatcher = dispatched(plan, journal)
    acts = []
    tasks = [task_of(plan, -1, GATHER, 0)]
    dispatcher.unless_begun(tasks, lambda: acts.append("before"))
    first_forward(dispatcher)
    dispatcher.unless_begun(tasks, lambda: acts.append("after"))
    assert acts == ["before"]


@pytest.mark.parametrize("where", ["wait", "land"])
def test_a_failure_is_raised_where_it_is_waited_for(where, dispatched):
    plan, journal = named_plan("dear", SHAPES), Journal(at_once=False)
    lost = ChannelError("rank 1 is gone")

    def land(task):
        raise lost

    if where == "land":
        journal.land = land
    dispatcher = dispatched(plan, journal, inline=False)
    backward(dispatcher, 0)
    journal.pending["0 reduce b"].failure = lost if where == "wait" else None
    journal.pending["0 reduce b"].over.set()
    with pytest.raises(ChannelError, match="rank 1 is gone"):
        dispatcher.require([task_of(plan, 0, REDUCE, 1)])
    with pytest.raises(ChannelError, match="rank 1 is gone"):
        dispatcher.drain(0)
    dispatcher.arrive(0, 9)
    assert journal.begun == ["0 reduce b", "0 reduce a"], "nothing begins after a failure"


def test_to_wait_for_what_only_this_thread_can_bring_about_is_refused(dispatched):
    plan, journal = named_plan("zero2", SHAPES, Wish(prefetch=0)), Journal()
    dispatcher = dispatched(plan, journal)
    dispatcher.open_cycle(-1)
    dispatcher.arrive(-1, 6)
    # b runs before a: its gate has not come.
    with pytest.raises(StrettoError, match=r"the gather of unit 1 \(b\) is needed now, but .*dear"):
        dispatcher.require([task_of(plan, -1, GATHER, 1)])


def test_to_wait_behind_a_reduction_without_gradients_is_refused(dispatched):
    plan, journal = named_plan("dear", SHAPES), Journal()
    dispatcher = dispatched(plan, journal)
    dispatcher.open_cycle(0)
    dispatcher.count(0, last=True)
    dispatcher.arrive(0, 6)
    dispatcher.produced(0, 0, [0])
    reason = r"reduce of unit 0 \(a\) is needed now, but stands behind the reduce of unit 1 \(b\)"
    with pytest.raises(StrettoError, match=reason):
        dispatcher.require([task_of(plan, 0, REDUCE, 0)])


def test_a_drain_lets_reductions_go_before_their_gates_and_no_more(dispatched):
    plan = named_plan("zero2", SHAPES, Wish(prefetch=0))
    late = plan.messages[1].model_copy(update={"gate": 3})
    plan = plan.replace(messages=(plan.messages[0], late, *plan.messages[2:]))
    journal = Journal()
    dispatcher = dispatched(plan, journal, inline=False)
    first_forward(dispatcher)
    backward(dispatcher, 0)
    assert journal.begun[2:] == ["0 reduce b"]
    dispatcher.drain(0)
    assert journal.landed[2:] == ["0 reduce b", "0 reduce a"]


def test_everything_lands_in_the_order_in_which_it_began(dispatched):
    plan, journal = named_plan("dear", SHAPES), Journal(at_once=False)
    dispatcher = dispatched(plan, journal, inline=False)
    backward(dispatcher, 0)
    journal.pending["0 reduce a"].over.set()  # the second one is over first
    assert journal.landed == []
    journal.pending["0 reduce b"].over.set()
    dispatcher.require([task_of(plan, 0, REDUCE, 0)])
    assert journal.landed[:2] == ["0 reduce b", "0 reduce a"]


def test_a_message_that_cannot_begin_after_a_landing_fails_where_it_is_waited_for(dispatched):
    plan, journal = named_plan("dear", SHAPES), Journal(at_once=False)
    begin = journal.carry

    def carry(task):
        if task.message.what is GATHER:
            raise ChannelError("no memory")
        return begin(task)

    journal.carry = carry
    dispatcher = dispatched(plan, journal, inline=False)
    backward(dispatcher, 0)
    for pending in journal.pending.values():
        pending.over.set()
    with pytest.raises(ChannelError, match="no memory"):
        dispatcher.require([task_of(plan, 0, GATHER, 0)])

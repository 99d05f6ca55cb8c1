"""Step programs predict what real ranks send; they are verified, and wrong ones are refused."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch

from benchmarks import random_plans
from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import doubling
from stretto.collectives.schedule import move_to_lane
from stretto.comm.in_process_transports import RecordingTransport, run_threads
from stretto.program.blocking_run import find_deadlock
from stretto.program.messages import Message, messages_of
from stretto.program.step_program import (
    ALL,
    NATIVE_LANE,
    Applied,
    Group,
    Kind,
    Moment,
    Operation,
    ParameterBlock,
    Payload,
    Phase,
    Placement,
    Source,
    StepProgram,
    WhenSkipped,
)
from stretto.program.verify import ProgramError, verify
from stretto.strategies import build_strategy
from tests.laws.program_settings import SETTINGS, TWO_BY_TWO, Setting, calls_of, model


def ids(setting):
    return setting.name


def train(setting, steps):
    """Return what each rank of real ranks sends in ``steps`` steps, in order on each lane."""
    inputs = torch.ones(2, 10) * torch.arange(1, 3)[:, None] / 7

    def work(transport):
        recorder = RecordingTransport(transport)
        net = model()
        strategy = build_strategy(
            setting.config(),
            recorder,
            weigh_samples=setting.weighs_samples,
            calls=calls_of(net),
        )
        strategy.reads_gradients = setting.reads_gradients
        net, optimizer = strategy.attach(net, lambda p: torch.optim.SGD(p, lr=0.01))
        recorder.sent.clear()
        half = torch.autocast("cpu", torch.bfloat16, enabled="parameters" in setting.values)
        for step in range(steps):
            if setting.weighs_samples:  # forward counts the samples
                with half:
                    loss = net(inputs).mean()
                strategy.begin(step, 0, True, 0.01)
            else:
                strategy.begin(step, 0, True, 0.01)
                with half:
                    loss = net(inputs).sum()
            loss.backward()
            if not strategy.after_backward().is_applied:
                optimizer.step()
            optimizer.zero_grad()
            strategy.after_update()
        if setting.kind == "adpsgd":
            strategy.consolidate()  # averages in flight end
        strategy.close()
        return [Message(sent.peer, sent.num_bytes, sent.lane) for sent in recorder.sent]

    return [by_lane(sent) for sent in run_threads(Mesh(setting.mesh), work)]


def by_lane(messages):
    found = defaultdict(list)
    for message in messages:
        found[NATIVE_LANE if message.peer < 0 else message.lane].append(message[:2])
    return found


def is_of_first_forward(program, operation):
    """Return whether a gather makes a sharded block whole for the very first forward."""
    placement = program.blocks[operation.block].placement if operation.block >= 0 else None
    is_gather = operation.kind is Kind.ALL_GATHER and operation.source is Source.PARAMETER
    freed = placement in (Placement.SHARDED, Placement.SHARDED_TWICE)
    return is_gather and freed and (operation.due.phase.name == "FORWARD" or operation.due.later)


def predicted(program, rank, steps):
    """Return what ``rank`` sends by its program, in order on each lane, and how much at least.

    The last step's messages may stay when no forward follows.
    """
    messages, least = [], []
    for step in range(-1, steps):
        if step == steps - 1:
            least = list(messages)
        for operation in program.leaving(max(step, 0)):
            if step >= 0 or is_of_first_forward(program, operation):
                messages += messages_of(operation, rank, program.mesh.size)
    return by_lane(messages), by_lane(least)


@pytest.mark.parametrize("setting", SETTINGS, ids=ids)
def test_a_program_predicts_every_message_lane_and_byte(setting):
    program = setting.program()
    steps = program.first_step + 2 * program.period + 2
    for rank, sent in enumerate(train(setting, steps)):
        expected, least = predicted(program, rank, steps)
        if setting.kind == "adpsgd":
            # A passive rank answers in any order; at the end active ranks say that they stop.
            stops = [(peer, 4) for peer in range(1, len(setting.mesh), 2)] if rank % 2 == 0 else []
            assert Counter(sent[1]) == Counter(expected[1] + stops)
            continue
        for lane in {*sent, *expected}:
            assert sent[lane] == expected[lane][: len(sent[lane])], f"rank {rank}, lane {lane}"
            assert len(sent[lane]) >= len(least[lane]), f"rank {rank}, lane {lane}"


@pytest.mark.parametrize("setting", SETTINGS, ids=ids)
def test_every_program_is_verified(setting):
    verify(setting.program())


@pytest.mark.parametrize("seed", range(100))
def test_random_valid_plans_are_accepted(seed):
    assert random_plans.refused(seed) == ""


# --- programs with one mistake ---


def changed(program, index, change, step=None):
    """Return ``program`` with the operation ``index`` changed into those that ``change`` returns.

    The operations that follow one of the step by its index keep following the same one.
    """
    steps = [step] if step is not None else None

    def operations(at, requested):
        before = program.operations(at, requested)
        if index >= len(before) or (steps is not None and at not in steps):
            return before
        found, new_index = [], {}
        for number, operation in enumerate(before):
            if operation.after is not None:
                operation = operation._replace(after=new_index.get(operation.after))
            new_index[number] = len(found)
            found += change(operation) if number == index else [operation]
        return tuple(found)

    return program.replace_operations(operations)


def earlier(operation):
    """Return the operation with a gate before its data is there."""
    block = operation.block
    phase = Phase.BACKWARD if operation.source is Source.GRADIENT else Phase.GRADIENT
    gate = Moment(Phase.GRADIENT) if operation.gate.block == ALL else Moment(phase, block)
    return operation._replace(gate=gate, after=None)


def mistakes(operation, program):
    """Yield mistakes in one operation that are mistakes in any program, by name."""
    yield "dropped", lambda one: []
    yield "doubled", lambda one: [one, one]
    yield "gate early", lambda one: [earlier(one)]
    yield "due early", lambda one: [one._replace(due=Moment(Phase.BACKWARD))]
    later = operation.due._replace(later=operation.due.later + 1)
    yield "due a step late", lambda one: [one._replace(due=later)]
    other = {Group.WORLD: Group.INSIDE, Group.INSIDE: Group.WORLD, Group.PEERS: Group.WORLD}
    yield "other group", lambda one: [one._replace(group=other[one.group])]
    if len(program.leaving(program.first_step)) > 1:
        yield "other queue", lambda one: [one._replace(queue=one.queue + 7)]


def wrong_programs():
    """Return the mistakes in one setting of each kind, by name."""
    chosen = [
        Setting("allreduce", {"algorithm": "ring", "bucket_bytes": 1000}),
        Setting("allreduce", {"algorithm": "hierarchical/2", "bucket_bytes": 1000}, TWO_BY_TWO),
        Setting("sharded", {"plan": "ddp", "unit": 0}),
        Setting("sharded", {"plan": "dear", "unit": 0}),
        Setting("sharded", {"plan": "zero2", "unit": 0}),
        Setting("sharded", {"plan": "zero3", "unit": 0}),
        Setting("sharded", {"plan": "zero2", "unit": 0}, reads_gradients=True),
        Setting("crossover", {}),
        Setting("crossover", {"delay": 1}),
        Setting("crossover", {"groups": 2, "delay": 1}, TWO_BY_TWO),
        Setting("sgp", {"segments": "fine"}),
        Setting("local_sgd", {"every": 2}),
        Setting("diloco", {"every": 6, "fragments": 3, "delay": 1}),
        Setting("noloco", {"every": 2}),
    ]
    for setting in chosen:
        program = setting.program()
        step = next(step for step in program.steps() if program.leaving(step))
        operations = program.leaving(step)
        for index in {0, len(operations) - 1}:
            for name, change in mistakes(operations[index], program):
                yield f"{setting.name} {index} {name}", program, index, change


WRONG = {name: rest for name, *rest in wrong_programs()}


@pytest.mark.parametrize("name", WRONG)
def test_a_program_with_a_mistake_is_refused(name):
    program, index, change = WRONG[name]
    with pytest.raises(ProgramError):
        verify(changed(program, index, change))


# --- waiting for ever ---


def by_hand(operations, **changes):
    """Return a program of two blocks on two ranks with these operations in every step."""
    blocks = tuple(ParameterBlock((f"b{index}",), 8, 4, index) for index in range(2))
    program = StepProgram(
        "by hand", Mesh((1, 1)), blocks, lambda _step, _requested: tuple(operations)
    )
    return replace(program, **changes)


def sum_of(block, gate, due, *, queue=0, lane=0, **changes):
    operation = Operation(
        Kind.ALL_REDUCE,
        Source.GRADIENT,
        block,
        Group.WORLD,
        Payload(8, 4),
        move_to_lane(doubling(2), lane),
        gate,
        due,
    )
    return operation._replace(queue=queue, **changes)


def at(phase, block=ALL, later=0):
    return Moment(phase, block, later)


FIRST, SECOND = at(Phase.GRADIENT, 1), at(Phase.GRADIENT, 0)
FIRST_DUE, SECOND_DUE = at(Phase.UPDATE, 1), at(Phase.UPDATE, 0)


def test_a_program_by_hand_is_accepted():
    verify(by_hand([sum_of(1, FIRST, FIRST_DUE), sum_of(0, SECOND, SECOND_DUE)]))


def test_a_wait_for_what_stands_behind_a_later_gate_is_found():
    behind = [sum_of(0, SECOND, SECOND_DUE), sum_of(1, FIRST, SECOND)]
    assert find_deadlock(by_hand(behind)) is None  # the gate opens before the wait
    behind[1] = sum_of(1, FIRST, at(Phase.BACKWARD, 0))
    assert "another is before it in its queue" in find_deadlock(by_hand(behind))
    assert find_deadlock(by_hand(behind[::-1])) is None


def test_a_circle_across_two_queues_is_found():
    late = sum_of(0, at(Phase.UPDATED), at(Phase.END), queue=1, lane=1)
    behind = sum_of(1, FIRST, at(Phase.END), queue=1, lane=1)
    waits = sum_of(1, FIRST, FIRST_DUE, after=1)
    circle = by_hand([late, behind, waits])
    assert "follows one that has not been applied" in find_deadlock(circle)
    assert find_deadlock(by_hand([behind, late, waits._replace(after=0)])) is None


def test_a_rank_that_skips_alone_what_others_wait_for_is_found():
    stays = sum_of(1, FIRST, FIRST_DUE, when_skipped=WhenSkipped.SKIP)
    program = by_hand([stays, sum_of(0, SECOND, SECOND_DUE)])
    assert find_deadlock(program, frozenset({(0, 0), (0, 1)})) is None
    assert "it waits for rank" in find_deadlock(program, frozenset({(0, 0)}))
    verify(program)
    with pytest.raises(ProgramError, match="waits for rank"):
        verify(replace(program, skips_alone=True))


def test_a_consolidation_that_waits_for_what_starts_later_is_found():
    next_forward = at(Phase.FORWARD, 1)
    first = sum_of(1, at(Phase.FORWARD), next_forward, queue=1, lane=1)
    second = sum_of(0, at(Phase.END), next_forward, after=0)
    program = by_hand([first, second])
    assert find_deadlock(program) is None
    assert "consolidation after step 1" in find_deadlock(program, consolidated=1)


def test_lanes_that_two_queues_share_are_refused():
    shared = [sum_of(1, FIRST, FIRST_DUE), sum_of(0, SECOND, SECOND_DUE, queue=1)]
    with pytest.raises(ProgramError, match="share lane 0"):
        verify(by_hand(shared))
    verify(by_hand([shared[0], sum_of(0, SECOND, SECOND_DUE, queue=1, lane=1)]))


def test_what_is_applied_too_early_is_refused():
    program = Setting("crossover", {"delay": 1}).program()
    with pytest.raises(ProgramError, match="the rank uses the same memory"):
        verify(changed(program, 0, lambda one: [one._replace(applied=Applied.ARRIVAL)]))


def test_equal_programs_have_equal_digests_and_others_do_not():
    programs = [setting.program() for setting in SETTINGS[:30]]
    assert [p.digest() for p in programs] == [s.program().digest() for s in SETTINGS[:30]]
    first = programs[0]
    moved = changed(first, 0, lambda one: [one._replace(due=Moment(Phase.UPDATE))])
    assert moved.digest() != first.digest()

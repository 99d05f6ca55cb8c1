"""What holds of every collective in the tables."""

import itertools
from dataclasses import replace

import pytest
import torch

from stretto.comm.algorithms import ALLREDUCE, broadcast
from stretto.comm.execute import execute
from stretto.comm.local import run_local
from stretto.comm.schedule import Action, Schedule, chunk_bounds, rounds
from stretto.comm.verify import verify_allreduce, verify_broadcast
from stretto.errors import ScheduleError

SIZES = [*range(1, 10), 16, 17]
LENGTHS = [0, 1, 2, 7, 13, 101, 1024]


@pytest.mark.parametrize("size", [*SIZES, 32, 64])
@pytest.mark.parametrize("name", ALLREDUCE)
def test_every_rank_ends_with_every_input_exactly_once(name, size):
    verify_allreduce(ALLREDUCE[name](size))


@pytest.mark.parametrize("size", [*SIZES, 32, 64])
def test_broadcast_gives_everybody_the_input_of_rank_0(size):
    verify_broadcast(broadcast(size))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ALLREDUCE)
def test_executed_it_is_the_sum_with_the_same_bits_everywhere(name, size, length):
    inputs = torch.randn(size, length, dtype=torch.float64, generator=torch.manual_seed(0))

    def work(channel):
        mine = inputs[channel.rank].clone()
        execute(ALLREDUCE[name](size), mine, channel)
        return mine

    results = run_local(size, work)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], inputs.sum(dim=0), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_sends_two_n_minus_one_messages_of_one_chunk(size):
    sends = [op for op in ALLREDUCE["ring"](size).program(0) if op.action is Action.SEND]
    assert len(sends) == 2 * (size - 1)
    assert all(op.stop - op.start == 1 for op in sends)


@pytest.mark.parametrize("size", SIZES)
def test_a_broadcast_takes_the_logarithm_of_n_rounds(size):
    # A relay's rounds follow those of whoever it hears from: depth, not length, is what counts.
    schedule = broadcast(size)
    heard = {0: 0}
    for rank in range(size):
        sends = [op.peer for op in schedule.program(rank) if op.action is Action.SEND]
        heard |= {peer: heard[rank] + 1 + place for place, peer in enumerate(sends)}
    assert max(heard.values()) == (size - 1).bit_length()


def test_chunks_cover_the_tensor_and_differ_by_one_at_most():
    for numel in (0, 1, 5, 17):
        for num_chunks in (1, 2, 3, 8):
            bounds = chunk_bounds(numel, num_chunks)
            sizes = [b - a for a, b in itertools.pairwise(bounds)]
            assert sum(sizes) == numel
            assert max(sizes) - min(sizes) <= 1


def mutate(schedule: Schedule, rank: int, change) -> Schedule:
    def program(r):
        ops = schedule.program(r)
        return change(ops) if r == rank else ops

    return replace(schedule, program=program)


MUTATIONS = {
    "first operation dropped": lambda ops: tuple(replace(o, after=()) for o in ops[1:]),
    "last operation dropped": lambda ops: ops[:-1],
    "last operation doubled": lambda ops: (*ops, ops[-1]),
    "add becomes copy": lambda ops: (ops[0], replace(ops[1], action=Action.COPY), *ops[2:]),
    "copy becomes add": lambda ops: (*ops[:-1], replace(ops[-1], action=Action.ADD)),
    "chunk off by one": lambda ops: (
        replace(ops[0], start=(ops[0].start + 1) % 4, stop=(ops[0].start + 1) % 4 + 1),
        *ops[1:],
    ),
    "wrong peer": lambda ops: (replace(ops[0], peer=(ops[0].peer + 1) % 4), *ops[1:]),
    "wrong lane": lambda ops: (replace(ops[0], lane=1), *ops[1:]),
    "sends what has not arrived": lambda ops: tuple(replace(o, after=()) for o in ops),
    "no such chunk": lambda ops: (replace(ops[0], start=4, stop=5), *ops[1:]),
    "waits for the future": lambda ops: (replace(ops[0], after=(3,)), *ops[1:]),
}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_ring_is_refused(mutation, rank):
    broken = mutate(ALLREDUCE["ring"](4), rank, MUTATIONS[mutation])
    with pytest.raises(ScheduleError):
        verify_allreduce(broken)


def test_a_circle_of_waits_is_named():
    ring = ALLREDUCE["ring"](3)

    def receive_first(rank):
        sends = [op for op in ring.program(rank) if op.action is Action.SEND]
        receives = [op for op in ring.program(rank) if op.action is not Action.SEND]
        first, second = replace(receives[0], after=()), replace(sends[0], after=(0,))
        return (first, second)

    with pytest.raises(ScheduleError, match="nobody can go on: rank 0 for \\[2\\]"):
        verify_allreduce(replace(ring, program=receive_first))


def test_rounds_hold_operations_that_need_not_wait_for_one_another():
    batches = rounds(ALLREDUCE["ring"](4), 1)
    assert [len(batch) for batch in batches] == [2] * 6

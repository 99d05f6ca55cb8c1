"""All-reduce inside groups of consecutive ranks."""

import pytest
import torch

from stretto.collectives.algorithms.ring import ring_in_groups
from stretto.collectives.schedule import Action
from stretto.comm.collective_executor import execute
from stretto.comm.in_process_transports import run_threads
from stretto.errors import ScheduleError

SIZE = 6


@pytest.mark.parametrize("numel", [0, 1, 7])
@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_each_group_ends_with_its_own_sum(width, numel):
    def on_rank(transport):
        tensor = torch.arange(numel, dtype=torch.float64) + 10.0**transport.rank
        execute(ring_in_groups(SIZE, width), tensor, transport)
        return tensor

    for rank, found in enumerate(run_threads(SIZE, on_rank)):
        first = rank - rank % width
        members = range(first, first + width)
        expected = width * torch.arange(numel, dtype=torch.float64) + sum(10.0**m for m in members)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("width", [2, 3])
def test_messages_stay_inside_groups_and_are_those_of_a_ring(width):
    schedule = ring_in_groups(SIZE, width)
    for rank in range(SIZE):
        ops = schedule.program(rank)
        assert {op.peer // width for op in ops} == {rank // width}
        sent = sum(op.stop - op.start for op in ops if op.action is Action.SEND)
        assert sent == 2 * (width - 1)


def test_groups_of_unequal_size_are_refused():
    with pytest.raises(ScheduleError, match="6 ranks cannot be divided into groups of 4"):
        ring_in_groups(SIZE, 4)

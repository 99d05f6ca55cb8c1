"""Sums inside groups of ranks in a row."""

import pytest
import torch

from stretto.comm.algorithms.in_groups import ring_in_groups
from stretto.comm.execute import execute
from stretto.comm.local import run_local
from stretto.comm.schedule import Action
from stretto.errors import ScheduleError

SIZE = 6


@pytest.mark.parametrize("numel", [0, 1, 7])
@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_each_group_ends_with_the_sum_of_its_own(width, numel):
    def on_rank(channel):
        tensor = torch.arange(numel, dtype=torch.float64) + 10.0**channel.rank
        execute(ring_in_groups(SIZE, width), tensor, channel)
        return tensor

    for rank, found in enumerate(run_local(SIZE, on_rank)):
        first = rank - rank % width
        members = range(first, first + width)
        wanted = width * torch.arange(numel, dtype=torch.float64) + sum(10.0**m for m in members)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("width", [2, 3])
def test_nothing_leaves_a_group_and_everybody_sends_as_a_ring_does(width):
    schedule = ring_in_groups(SIZE, width)
    for rank in range(SIZE):
        ops = schedule.program(rank)
        assert {op.peer // width for op in ops} == {rank // width}
        sent = sum(op.stop - op.start for op in ops if op.action is Action.SEND)
        assert sent == 2 * (width - 1)


def test_groups_of_unequal_size_are_refused():
    with pytest.raises(ScheduleError, match="6 ranks cannot be groups of 4"):
        ring_in_groups(SIZE, 4)

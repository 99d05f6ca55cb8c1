"""Where a unit's tensors lie, for any tensors, cuts and ranks: nothing lost, nothing twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.comm.shards import ALIGN, lay_unit
from stretto.errors import ScheduleError

RANKS = st.integers(1, 7)
NUMELS = st.lists(st.integers(1, 120), min_size=1, max_size=6)
CUTS = st.lists(st.integers(1, 200), min_size=1, max_size=5)
GRAINS = st.sampled_from([ALIGN, 2 * ALIGN, 3 * ALIGN])
quickly = settings(max_examples=120, deadline=None)


@quickly
@given(NUMELS, CUTS, RANKS, GRAINS)
def test_every_element_of_every_tensor_is_in_exactly_one_stretch(numels, cuts, ranks, grain):
    layout = lay_unit(numels, cuts, ranks, grain)
    found = [
        (s.tensor, s.start + i)
        for block in layout.blocks
        for s in block.stretches
        for i in range(s.length)
    ]
    assert sorted(found) == [(t, i) for t, numel in enumerate(numels) for i in range(numel)]
    assert sum(layout.owned_numel(rank) for rank in range(ranks)) == sum(numels)


@quickly
@given(NUMELS, CUTS, RANKS, GRAINS)
def test_a_stretch_lies_where_its_tensor_does_in_the_flat_one(numels, cuts, ranks, grain):
    layout = lay_unit(numels, cuts, ranks, grain)
    for block in layout.blocks:
        for s in block.stretches:
            place = block.chunk_start(s.owner) + s.place
            assert place == layout.offsets[s.tensor] + s.start
            assert s.length >= 1
            assert s.place + s.length <= block.chunk
    assert all(offset % ALIGN == 0 for offset in layout.offsets)


@quickly
@given(NUMELS, CUTS, RANKS, GRAINS)
def test_chunks_are_equal_and_of_whole_grains(numels, cuts, ranks, grain):
    layout = lay_unit(numels, cuts, ranks, grain)
    assert len(layout.blocks) == len(cuts)
    end = 0
    for block in layout.blocks:
        assert block.offset == end
        assert block.ranks == ranks
        assert block.chunk % grain == block.marks % grain == 0
        assert block.gradient_numel == block.numel + ranks * block.marks
        assert block.gradient_start(ranks - 1) + block.chunk + block.marks == block.gradient_numel
        end += block.numel
    assert layout.numel == end >= sum(numels)
    assert layout.shard_numel * ranks == layout.numel


@quickly
@given(NUMELS, CUTS, RANKS, GRAINS)
def test_every_tensor_in_a_chunk_has_a_mark_of_its_own(numels, cuts, ranks, grain):
    for block in lay_unit(numels, cuts, ranks, grain).blocks:
        for rank in range(ranks):
            owned = list(block.owned(rank))
            assert [s.mark for s in owned] == list(range(len(owned)))
            assert len({s.tensor for s in owned}) == len(owned) <= block.marks


@quickly
@given(NUMELS, CUTS, RANKS)
def test_a_block_that_is_left_empty_has_no_gradients_and_no_marks(numels, cuts, ranks):
    for block in lay_unit(numels, cuts, ranks).blocks:
        if not block.numel:
            assert block.stretches == ()
            assert block.gradient_numel == 0


def test_cuts_that_are_smaller_than_a_grain_of_all_ranks_leave_empty_blocks():
    layout = lay_unit([40], [10, 10, 10, 10], ranks=2)
    assert [block.numel for block in layout.blocks] == [32, 0, 0, 32]
    assert [layout.owned_numel(rank) for rank in range(2)] == [24, 16]


def test_cuts_beyond_the_end_and_short_of_it_are_mended():
    assert [b.numel for b in lay_unit([16], [500, 3], ranks=1).blocks] == [16, 0]
    assert [b.numel for b in lay_unit([160], [16, 16], ranks=1).blocks] == [16, 144]


def test_a_block_may_hold_several_tensors_and_a_tensor_reach_over_several_blocks():
    layout = lay_unit([5, 70, 3], [48, 64], ranks=1)
    assert layout.offsets == (0, 16, 96)
    held = [[(s.tensor, s.start, s.length) for s in block.stretches] for block in layout.blocks]
    assert held == [[(0, 0, 5), (1, 0, 32)], [(1, 32, 38), (2, 0, 3)]]


@pytest.mark.parametrize(("numels", "ranks"), [([], 2), ([4, 0], 2), ([4], 0)])
def test_nothing_to_lay_out_is_refused(numels, ranks):
    with pytest.raises(ScheduleError, match=rf"elements on {ranks} ranks"):
        lay_unit(numels, [4], ranks)

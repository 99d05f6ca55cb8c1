"""The layout of a unit, for any tensors, blocks and ranks: every element has one place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.comm.shard_layout import ALIGN, make_unit_layout
from stretto.errors import ScheduleError

RANKS = st.integers(1, 7)
NUMELS = st.lists(st.integers(1, 120), min_size=1, max_size=6)
BLOCK_LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=5)
ALIGNMENTS = st.sampled_from([ALIGN, 2 * ALIGN, 3 * ALIGN])
quickly = settings(max_examples=120, deadline=None)


@quickly
@given(NUMELS, BLOCK_LENGTHS, RANKS, ALIGNMENTS)
def test_every_element_of_every_tensor_is_in_exactly_one_slice(
    numels, block_lengths, ranks, alignment
):
    layout = make_unit_layout(numels, block_lengths, ranks, alignment)
    found = [
        (s.tensor, s.start + i)
        for block in layout.blocks
        for s in block.slices
        for i in range(s.length)
    ]
    assert sorted(found) == [(t, i) for t, numel in enumerate(numels) for i in range(numel)]
    assert sum(layout.owned_numel(rank) for rank in range(ranks)) == sum(numels)


@quickly
@given(NUMELS, BLOCK_LENGTHS, RANKS, ALIGNMENTS)
def test_a_slice_lies_at_the_offset_of_its_tensor(numels, block_lengths, ranks, alignment):
    layout = make_unit_layout(numels, block_lengths, ranks, alignment)
    for block in layout.blocks:
        for s in block.slices:
            offset_in_unit = block.chunk_start(s.owner) + s.chunk_offset
            assert offset_in_unit == layout.offsets[s.tensor] + s.start
            assert s.length >= 1
            assert s.chunk_offset + s.length <= block.chunk
    assert all(offset % ALIGN == 0 for offset in layout.offsets)


@quickly
@given(NUMELS, BLOCK_LENGTHS, RANKS, ALIGNMENTS)
def test_chunks_are_equal_and_multiples_of_the_alignment(numels, block_lengths, ranks, alignment):
    layout = make_unit_layout(numels, block_lengths, ranks, alignment)
    assert len(layout.blocks) == len(block_lengths)
    end = 0
    for block in layout.blocks:
        assert block.offset == end
        assert block.ranks == ranks
        assert block.chunk % alignment == block.num_flags % alignment == 0
        assert block.gradient_numel == block.numel + ranks * block.num_flags
        assert (
            block.gradient_start(ranks - 1) + block.chunk + block.num_flags == block.gradient_numel
        )
        end += block.numel
    assert layout.numel == end >= sum(numels)
    assert layout.shard_numel * ranks == layout.numel


@quickly
@given(NUMELS, BLOCK_LENGTHS, RANKS, ALIGNMENTS)
def test_every_tensor_in_a_chunk_has_its_own_flag(numels, block_lengths, ranks, alignment):
    for block in make_unit_layout(numels, block_lengths, ranks, alignment).blocks:
        for rank in range(ranks):
            owned = list(block.owned(rank))
            assert [s.flag_index for s in owned] == list(range(len(owned)))
            assert len({s.tensor for s in owned}) == len(owned) <= block.num_flags


@quickly
@given(NUMELS, BLOCK_LENGTHS, RANKS)
def test_an_empty_block_has_no_gradients_and_no_flags(numels, block_lengths, ranks):
    for block in make_unit_layout(numels, block_lengths, ranks).blocks:
        if not block.numel:
            assert block.slices == ()
            assert block.gradient_numel == 0


def test_blocks_shorter_than_the_alignment_of_all_ranks_may_become_empty():
    layout = make_unit_layout([40], [10, 10, 10, 10], ranks=2)
    assert [block.numel for block in layout.blocks] == [32, 0, 0, 32]
    assert [layout.owned_numel(rank) for rank in range(2)] == [24, 16]


def test_block_lengths_beyond_the_end_or_short_of_it_are_corrected():
    assert [b.numel for b in make_unit_layout([16], [500, 3], ranks=1).blocks] == [16, 0]
    assert [b.numel for b in make_unit_layout([160], [16, 16], ranks=1).blocks] == [16, 144]


def test_a_block_may_hold_several_tensors_and_a_tensor_span_several_blocks():
    layout = make_unit_layout([5, 70, 3], [48, 64], ranks=1)
    assert layout.offsets == (0, 16, 96)
    held = [[(s.tensor, s.start, s.length) for s in block.slices] for block in layout.blocks]
    assert held == [[(0, 0, 5), (1, 0, 32)], [(1, 32, 38), (2, 0, 3)]]


@pytest.mark.parametrize(("numels", "ranks"), [([], 2), ([4, 0], 2), ([4], 0)])
def test_an_empty_layout_is_refused(numels, ranks):
    with pytest.raises(ScheduleError, match=rf"elements on {ranks} ranks"):
        make_unit_layout(numels, [4], ranks)

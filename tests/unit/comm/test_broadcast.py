"""Gathering the tensors of all ranks on rank 0, with ranks as threads."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.comm import broadcast
from stretto.comm.broadcast import as_bytes, gather_to_rank_0, group_by_device
from stretto.comm.in_process_transports import run_threads

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int8, torch.uint8, torch.float8_e4m3fn),
)
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def of_rank(rank, kinds):
    """Return tensors with random bits, which differ from rank to rank."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for dtype, shape in kinds:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator)
        made.append(raw.view(dtype).view(shape))
    return made


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 4),
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=5),
)
def test_tensors_of_all_ranks_arrive_at_rank_0_bit_for_bit(size, kinds):
    gathered = run_threads(size, lambda c: gather_to_rank_0(of_rank(c.rank, kinds), c))
    assert gathered[1:] == [[]] * (size - 1)
    for rank, got in enumerate(gathered[0]):
        expected = of_rank(rank, kinds)
        assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in expected]
        assert torch.equal(as_bytes(got), as_bytes(expected))


def test_a_tensor_that_is_not_contiguous_arrives_in_its_shape():
    tensor = torch.arange(6).view(2, 3).T
    (got,) = run_threads(2, lambda c: gather_to_rank_0([tensor], c))[0][1]
    assert torch.equal(got, tensor)


def test_tensors_are_grouped_by_device_in_order():
    here, elsewhere = torch.zeros(2), torch.zeros(3, device="meta")
    assert group_by_device([here, elsewhere, here, elsewhere]) == [[0, 2], [1, 3]]
    assert group_by_device([elsewhere]) == [[0]]
    assert group_by_device([]) == []


def test_groups_by_device_are_merged_in_the_original_order(monkeypatch):
    # One device stands for two: every other tensor is taken to be on the second.
    def in_turn(tensors):
        return [list(range(first, len(tensors), 2)) for first in range(2)]

    monkeypatch.setattr(broadcast, "group_by_device", in_turn)
    kinds = [(torch.float32, [2]), (torch.int64, []), (torch.bfloat16, [3]), (torch.int8, [1, 2])]
    found = run_threads(3, lambda c: gather_to_rank_0(of_rank(c.rank, kinds), c))[0]
    for rank, got in enumerate(found):
        expected = of_rank(rank, kinds)
        assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in expected]
        assert torch.equal(as_bytes(got), as_bytes(expected))

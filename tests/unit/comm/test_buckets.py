"""How tensors are cut into buckets, and how buckets are packed and unpacked."""

import pytest
import torch
from torch import nn

from stretto.comm.buckets import Bucket
from stretto.program.blocks import TensorInfo, cut_buckets, parameters_in_backward_order

CPU = torch.device("cpu")
FLOAT = (torch.float32, CPU)


def infos(*sizes, kind=FLOAT):
    return [TensorInfo(size, kind) for size in sizes]


RAMP = (80, 160, 320, 640)
"""Tensors that each fill a bucket while the threshold grows from 80 to 640, before the cases."""


@pytest.mark.parametrize(
    ("sizes", "bucket_lengths"),
    [
        ((5,), (1,)),
        ((300, 300, 300), (2, 1)),
        ((300, 340, 1), (2, 1)),
        ((5000, 1, 1), (1, 2)),
        ((1, 5000, 1), (1, 1, 1)),
        ((1, 0, 639), (3,)),
    ],
)
def test_tensors_share_buckets_up_to_the_threshold_and_large_ones_have_their_own(
    sizes, bucket_lengths
):
    assert cut_buckets(infos(*RAMP, *sizes), bucket_bytes=640) == (1, 1, 1, 1, *bucket_lengths)


def test_the_first_buckets_are_small_and_each_may_be_twice_the_one_before():
    bucket_lengths = cut_buckets(infos(*[10] * 200), bucket_bytes=640)
    assert bucket_lengths == (8, 16, 32, 64, 64, 16)


def test_no_tensors_make_no_buckets():
    assert cut_buckets([], bucket_bytes=640) == ()


def test_a_bucket_never_mixes_types():
    mixed = [*infos(1, 1), *infos(1, 1, kind=(torch.bfloat16, CPU)), *infos(1)]
    assert cut_buckets(mixed, bucket_bytes=10_000) == (2, 2, 1)


def test_buckets_follow_the_order_of_backward_and_leave_frozen_parameters_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.requires_grad_(False)
    names = [name for name, _ in parameters_in_backward_order(model)]
    assert names == ["2.bias", "2.weight", "1.bias", "0.bias", "0.weight"]


def parameters():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def test_packing_and_unpacking_returns_the_gradients_as_views_of_one_buffer():
    params = parameters()
    before = [p.grad.clone() for p in params]
    bucket = Bucket(params, wire_dtype=None)
    bucket.pack()
    bucket.unpack()
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))
    assert all(
        p.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
        for p in params
    )


def test_parameters_have_no_gradient_between_pack_and_unpack():
    params = parameters()
    Bucket(params, wire_dtype=None).pack()
    assert [p.grad for p in params] == [None, None]


def test_the_weight_scales_on_pack_and_the_divisor_on_unpack():
    params = parameters()
    before = params[0].grad.clone()
    bucket = Bucket(params, wire_dtype=None)
    bucket.pack(weight=3.0)
    torch.testing.assert_close(bucket.flat[:6].view(3, 2), before * 3)
    bucket.unpack(divisor=6.0)
    torch.testing.assert_close(params[0].grad, before / 2)


def test_gradients_that_are_views_of_the_bucket_are_scaled_once():
    params = parameters()
    bucket = Bucket(params, wire_dtype=None)
    bucket.pack()
    bucket.unpack()
    before = params[1].grad.clone()
    bucket.pack(weight=2.0)
    bucket.unpack()
    torch.testing.assert_close(params[1].grad, before * 2)


def test_a_missing_gradient_is_sent_as_zero_and_stays_none_if_no_rank_has_one():
    params = parameters()
    bucket = Bucket(params, wire_dtype=None)
    bucket.flat.fill_(7)
    params[0].grad = None
    bucket.pack()
    assert not bucket.flat[:6].any()
    bucket.unpack()
    assert params[0].grad is None
    assert params[1].grad is not None


def test_a_gradient_that_only_another_rank_has_arrives():
    params = parameters()
    bucket = Bucket(params, wire_dtype=None)
    params[0].grad = None
    bucket.pack()
    bucket.flat[:6] += 5  # the gradient of the other rank in the sum,
    bucket.flat[10] += 1  # with its has-gradient flag
    bucket.unpack()
    assert torch.equal(params[0].grad, torch.full((3, 2), 5.0))


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float64])
def test_another_wire_type_keeps_gradients_in_the_type_of_their_parameter(wire):
    params = parameters()
    before = params[0].grad.clone()
    bucket = Bucket(params, wire)
    bucket.pack()
    assert bucket.flat.dtype == wire
    bucket.unpack()
    assert params[0].grad.dtype == torch.float32
    torch.testing.assert_close(params[0].grad, before, rtol=1e-2, atol=1e-2)

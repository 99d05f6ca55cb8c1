import pytest
import torch
from torch import nn

from stretto.comm.buckets import Bucket, Piece, cut_buckets, order_of_backward

CPU = torch.device("cpu")
FLOAT = (torch.float32, CPU)


def pieces(*sizes, kind=FLOAT):
    return [Piece(size, kind) for size in sizes]


RAMP = (80, 160, 320, 640)
"""Whole buckets while the threshold grows from 80 to 640: the cases below begin after them."""


@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [
        ((5,), (1,)),
        ((300, 300, 300), (2, 1)),
        ((300, 340, 1), (2, 1)),
        ((5000, 1, 1), (1, 2)),
        ((1, 5000, 1), (1, 1, 1)),
        ((1, 0, 639), (3,)),
    ],
)
def test_tensors_are_fused_up_to_the_threshold_and_large_ones_travel_alone(sizes, cuts):
    assert cut_buckets(pieces(*RAMP, *sizes), fusion_bytes=640) == (1, 1, 1, 1, *cuts)


def test_the_first_buckets_are_small_and_each_may_be_twice_the_one_before():
    cuts = cut_buckets(pieces(*[10] * 200), fusion_bytes=640)
    assert cuts == (8, 16, 32, 64, 64, 16)


def test_no_tensors_make_no_buckets():
    assert cut_buckets([], fusion_bytes=640) == ()


def test_a_bucket_never_mixes_types():
    mixed = [*pieces(1, 1), *pieces(1, 1, kind=(torch.bfloat16, CPU)), *pieces(1)]
    assert cut_buckets(mixed, fusion_bytes=10_000) == (2, 2, 1)


def test_buckets_follow_the_order_of_backward_and_leave_frozen_parameters_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.requires_grad_(False)
    names = [name for name, _ in order_of_backward(model)]
    assert names == ["2.bias", "2.weight", "1.bias", "0.bias", "0.weight"]


def parameters():
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def test_packing_and_unpacking_returns_the_gradients_as_views_of_one_buffer():
    made = parameters()
    before = [p.grad.clone() for p in made]
    bucket = Bucket(made, wire=None)
    bucket.pack()
    bucket.unpack()
    assert all(torch.equal(p.grad, b) for p, b in zip(made, before, strict=True))
    assert all(
        p.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
        for p in made
    )


def test_parameters_have_no_gradient_while_it_travels():
    made = parameters()
    Bucket(made, wire=None).pack()
    assert [p.grad for p in made] == [None, None]


def test_weights_and_divisors_scale_what_travels_and_what_arrives():
    made = parameters()
    before = made[0].grad.clone()
    bucket = Bucket(made, wire=None)
    bucket.pack(weight=3.0)
    torch.testing.assert_close(bucket.flat[:6].view(3, 2), before * 3)
    bucket.unpack(divisor=6.0)
    torch.testing.assert_close(made[0].grad, before / 2)


def test_gradients_that_already_live_in_the_bucket_are_scaled_once():
    made = parameters()
    bucket = Bucket(made, wire=None)
    bucket.pack()
    bucket.unpack()
    before = made[1].grad.clone()
    bucket.pack(weight=2.0)
    bucket.unpack()
    torch.testing.assert_close(made[1].grad, before * 2)


def test_an_absent_gradient_travels_as_zero_and_stays_absent_when_nobody_has_one():
    made = parameters()
    bucket = Bucket(made, wire=None)
    bucket.flat.fill_(7)
    made[0].grad = None
    bucket.pack()
    assert not bucket.flat[:6].any()
    bucket.unpack()
    assert made[0].grad is None
    assert made[1].grad is not None


def test_a_gradient_that_another_rank_has_arrives_here_too():
    made = parameters()
    bucket = Bucket(made, wire=None)
    made[0].grad = None
    bucket.pack()
    bucket.flat[:6] += 5  # what the sum brings from the other rank,
    bucket.flat[10] += 1  # with its mark
    bucket.unpack()
    assert torch.equal(made[0].grad, torch.full((3, 2), 5.0))


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float64])
def test_another_wire_type_keeps_gradients_in_the_type_of_their_parameter(wire):
    made = parameters()
    before = made[0].grad.clone()
    bucket = Bucket(made, wire)
    bucket.pack()
    assert bucket.flat.dtype == wire
    bucket.unpack()
    assert made[0].grad.dtype == torch.float32
    torch.testing.assert_close(made[0].grad, before, rtol=1e-2, atol=1e-2)

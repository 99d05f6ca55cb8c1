"""How buckets travel: marks stay whole numbers, and what a sparse wire keeps is handed on."""

import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh
from stretto.comm.algorithms.table import parse_table
from stretto.comm.buckets import Bucket
from stretto.comm.carriers import carriers_for
from stretto.comm.codecs import parse_wire
from stretto.comm.courier import Courier
from stretto.comm.local import run_local
from stretto.comm.recording import RecordingChannel
from stretto.errors import CheckpointError

WIRES = ["own", "bf16", "fp16", "fp8", "topk 10%"]
SMALL = 1e-6
"""Beside a mark of 1 a codec that scales by the largest would round this to nothing."""


def bucket_of(wire: str, *sizes: int) -> Bucket:
    return Bucket([nn.Parameter(torch.zeros(size)) for size in sizes], parse_wire(wire).dtype)


def carried(channel, wire, buckets, *, algorithm="ring", steps=1, gradients=None):
    """Send the buckets ``steps`` times; return gradients by parameter, and the carriers."""
    with Courier(channel) as courier:
        table = parse_table(algorithm)
        carriers = carriers_for(buckets, table, parse_wire(wire), courier, channel)
        for _ in range(steps):
            for index, bucket in enumerate(buckets):
                for place, parameter in enumerate(bucket.parameters):
                    parameter.grad = (gradients or gradient)(channel.rank, index, place, parameter)
                bucket.pack()
            for pending in [carrier.start() for carrier in carriers]:
                pending.wait()
                assert pending.finished_s is not None
            for bucket in buckets:
                bucket.unpack()
    return [[p.grad for p in bucket.parameters] for bucket in buckets], carriers


def gradient(rank, bucket, place, parameter):
    """The first parameter is everybody's, the second only rank 1's, the third nobody's."""
    if place == 2 or (place == 1 and rank != 1):
        return None
    return torch.full_like(parameter, SMALL * (1 + bucket))


@pytest.mark.parametrize("algorithm", ["ring/2", "hierarchical", "doubling", "double-tree"])
@pytest.mark.parametrize("wire", ["own", "bf16", "fp16", "fp8", "topk 100%"])
def test_gradients_are_summed_and_what_nobody_had_stays_absent(wire, algorithm):
    def work(channel):
        buckets = [bucket_of(wire, 40, 30, 20), bucket_of(wire, 7, 5, 3)]
        return carried(channel, wire, buckets, algorithm=algorithm, steps=2)[0]

    for of_rank in run_local(Mesh((2, 1)), work):
        for index, (everybody, one, nobody) in enumerate(of_rank):
            assert nobody is None
            # An eighth is one step of fp8, and more than one of fp16 where numbers are so small.
            for got, count in ((everybody, 3), (one, 1)):
                wanted = torch.full_like(got, count * SMALL * (1 + index))
                torch.testing.assert_close(got, wanted, rtol=1 / 8, atol=0)


@pytest.mark.parametrize("wire", WIRES)
def test_every_rank_is_left_with_the_same_bits(wire):
    def noise(rank, bucket, place, parameter):
        generator = torch.Generator().manual_seed(100 * rank + 10 * bucket + place)
        return torch.randn(parameter.shape, generator=generator)

    def work(channel):
        buckets = [bucket_of(wire, 300, 200), bucket_of(wire, 5)]
        return carried(channel, wire, buckets, steps=3, gradients=noise)[0]

    first, *others = run_local(5, work)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("wire", "at_most"), [("fp8", 0.27), ("bf16", 0.51), ("topk 10%", 0.41)])
def test_a_narrow_wire_sends_fewer_bytes(wire, at_most):
    def work(channel):
        sent = {}
        for kind in ("own", wire):
            recorder = RecordingChannel(channel)
            buckets = [bucket_of(kind, 4000)]
            carried(recorder, kind, buckets, steps=1)
            recorder.sent.clear()
            carried(recorder, kind, buckets, steps=1)
            sent[kind] = sum(m.num_bytes for m in recorder.sent if m.peer >= 0)
        return sent[wire] / sent["own"]

    assert all(share <= at_most for share in run_local(4, work))


def test_what_a_sparse_wire_did_not_send_is_its_state_and_can_be_handed_back():
    def work(channel):
        buckets = [bucket_of("topk 10%", 100)]
        with Courier(channel) as courier:
            wire = parse_wire("topk 10%")
            (carrier,) = carriers_for(buckets, parse_table("ring"), wire, courier, channel)
            sums = []
            for _ in range(2):
                buckets[0].parameters[0].grad = torch.arange(100.0) + channel.rank
                buckets[0].pack()
                carrier.start().wait()
                buckets[0].unpack()
                sums.append(buckets[0].parameters[0].grad.clone())
                if len(sums) == 1:
                    left = carrier.state_dict()
            carrier.load_state_dict(left)
            buckets[0].parameters[0].grad = torch.arange(100.0) + channel.rank
            buckets[0].pack()
            carrier.start().wait()
            buckets[0].unpack()
            again = buckets[0].parameters[0].grad
        return left["residual"], sums, again

    for rank, (residual, (first, second), again) in enumerate(run_local(2, work)):
        # Nothing is lost: what one rank kept and what it sent are its gradient.
        assert residual[:90].tolist() == [float(place + rank) for place in range(90)]
        assert residual[90:].eq(0).all()
        assert first[90:].tolist() == [2.0 * place + 1 for place in range(90, 100)]
        assert torch.equal(second, again)


def test_a_residual_of_other_gradients_is_refused():
    def work(channel):
        with Courier(channel) as courier:
            wire = parse_wire("topk 10%")
            buckets = [bucket_of("topk 10%", 10)]
            (carrier,) = carriers_for(buckets, parse_table("ring"), wire, courier, channel)
            with pytest.raises(CheckpointError, match="11 elements, the gradients have 10"):
                carrier.load_state_dict({"residual": torch.zeros(11)})

    run_local(2, work)


@pytest.mark.parametrize("wire", ["own", "bf16", "fp8"])
def test_other_wires_keep_nothing(wire):
    def work(channel):
        return carried(channel, wire, [bucket_of(wire, 10)])[1]

    for carriers in run_local(2, work):
        assert [carrier.state_dict() for carrier in carriers] == [{}]

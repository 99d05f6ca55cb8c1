"""Bucket reducers: flags stay whole numbers, and the residual of a sparse wire is kept."""

import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import parse_table
from stretto.collectives.codecs import parse_wire
from stretto.comm.buckets import Bucket
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.in_process_transports import RecordingTransport, run_threads
from stretto.comm.reducer import bucket_reducers_for
from stretto.errors import CheckpointError

WIRES = ["own", "bf16", "fp16", "fp8", "topk 10%"]
SMALL = 1e-6
"""Beside a flag of 1, a codec that scales by the largest value would round this to 0."""


def bucket_of(wire: str, *sizes: int) -> Bucket:
    return Bucket([nn.Parameter(torch.zeros(size)) for size in sizes], parse_wire(wire).dtype)


def reduce_buckets(transport, wire, buckets, *, algorithm="ring", steps=1, gradients=None):
    """Sum the buckets ``steps`` times; return the gradients of each bucket, and the reducers."""
    with CollectiveExecutor(transport) as executor:
        table = parse_table(algorithm)
        bucket_reducers = bucket_reducers_for(buckets, table, parse_wire(wire), executor, transport)
        for _ in range(steps):
            for index, bucket in enumerate(buckets):
                for index_in_bucket, parameter in enumerate(bucket.parameters):
                    parameter.grad = (gradients or gradient)(
                        transport.rank, index, index_in_bucket, parameter
                    )
                bucket.pack()
            for handle in [bucket_reducer.start() for bucket_reducer in bucket_reducers]:
                handle.wait()
                assert handle.finished_s is not None
            for bucket in buckets:
                bucket.unpack()
    return [[p.grad for p in bucket.parameters] for bucket in buckets], bucket_reducers


def gradient(rank, bucket, index_in_bucket, parameter):
    """All ranks have a gradient of parameter 0, only rank 1 of parameter 1, none of parameter 2."""
    if index_in_bucket == 2 or (index_in_bucket == 1 and rank != 1):
        return None
    return torch.full_like(parameter, SMALL * (1 + bucket))


@pytest.mark.parametrize("algorithm", ["ring/2", "hierarchical", "doubling", "double-tree"])
@pytest.mark.parametrize("wire", ["own", "bf16", "fp16", "fp8", "topk 100%"])
def test_gradients_are_summed_and_a_gradient_that_no_rank_has_stays_none(wire, algorithm):
    def work(transport):
        buckets = [bucket_of(wire, 40, 30, 20), bucket_of(wire, 7, 5, 3)]
        return reduce_buckets(transport, wire, buckets, algorithm=algorithm, steps=2)[0]

    for of_rank in run_threads(Mesh((2, 1)), work):
        for index, (of_all_ranks, of_rank_1, of_none) in enumerate(of_rank):
            assert of_none is None
            # 1/8 is one step of fp8, and more than a step of fp16 for numbers this small.
            for got, count in ((of_all_ranks, 3), (of_rank_1, 1)):
                expected = torch.full_like(got, count * SMALL * (1 + index))
                torch.testing.assert_close(got, expected, rtol=1 / 8, atol=0)


@pytest.mark.parametrize("wire", WIRES)
def test_every_rank_ends_with_the_same_bits(wire):
    def noise(rank, bucket, index_in_bucket, parameter):
        generator = torch.Generator().manual_seed(100 * rank + 10 * bucket + index_in_bucket)
        return torch.randn(parameter.shape, generator=generator)

    def work(transport):
        buckets = [bucket_of(wire, 300, 200), bucket_of(wire, 5)]
        return reduce_buckets(transport, wire, buckets, steps=3, gradients=noise)[0]

    first, *others = run_threads(5, work)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("wire", "at_most"), [("fp8", 0.27), ("bf16", 0.51), ("topk 10%", 0.41)])
def test_a_narrow_wire_sends_fewer_bytes(wire, at_most):
    def work(transport):
        sent = {}
        for kind in ("own", wire):
            recorder = RecordingTransport(transport)
            buckets = [bucket_of(kind, 4000)]
            reduce_buckets(recorder, kind, buckets, steps=1)
            recorder.sent.clear()
            reduce_buckets(recorder, kind, buckets, steps=1)
            sent[kind] = sum(m.num_bytes for m in recorder.sent if m.peer >= 0)
        return sent[wire] / sent["own"]

    assert all(share <= at_most for share in run_threads(4, work))


def test_the_residual_of_a_sparse_wire_can_be_saved_and_restored():
    def work(transport):
        buckets = [bucket_of("topk 10%", 100)]
        with CollectiveExecutor(transport) as executor:
            wire = parse_wire("topk 10%")
            (bucket_reducer,) = bucket_reducers_for(
                buckets, parse_table("ring"), wire, executor, transport
            )
            sums = []
            for _ in range(2):
                buckets[0].parameters[0].grad = torch.arange(100.0) + transport.rank
                buckets[0].pack()
                bucket_reducer.start().wait()
                buckets[0].unpack()
                sums.append(buckets[0].parameters[0].grad.clone())
                if len(sums) == 1:
                    left = bucket_reducer.state_dict()
            bucket_reducer.load_state_dict(left)
            buckets[0].parameters[0].grad = torch.arange(100.0) + transport.rank
            buckets[0].pack()
            bucket_reducer.start().wait()
            buckets[0].unpack()
            again = buckets[0].parameters[0].grad
        return left["residual"], sums, again

    for rank, (residual, (first, second), again) in enumerate(run_threads(2, work)):
        # Nothing is lost: the residual and the sent entries together are the gradient.
        assert residual[:90].tolist() == [float(i + rank) for i in range(90)]
        assert residual[90:].eq(0).all()
        assert first[90:].tolist() == [2.0 * i + 1 for i in range(90, 100)]
        assert torch.equal(second, again)


def test_a_residual_of_another_size_is_refused():
    def work(transport):
        with CollectiveExecutor(transport) as executor:
            wire = parse_wire("topk 10%")
            buckets = [bucket_of("topk 10%", 10)]
            (bucket_reducer,) = bucket_reducers_for(
                buckets, parse_table("ring"), wire, executor, transport
            )
            with pytest.raises(CheckpointError, match="11 elements, the gradients have 10"):
                bucket_reducer.load_state_dict({"residual": torch.zeros(11)})

    run_threads(2, work)


@pytest.mark.parametrize("wire", ["own", "bf16", "fp8"])
def test_other_wires_have_no_state(wire):
    def work(transport):
        return reduce_buckets(transport, wire, [bucket_of(wire, 10)])[1]

    for bucket_reducers in run_threads(2, work):
        assert [bucket_reducer.state_dict() for bucket_reducer in bucket_reducers] == [{}]

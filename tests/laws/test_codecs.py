"""Laws of every codec with every algorithm in the tables."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALL_GATHER, ALLREDUCE
from stretto.collectives.codec_error_bound import error_bound
from stretto.collectives.codecs import PER_HOP_ERROR, Fp8
from stretto.collectives.schedule import chunk_bounds
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.in_process_transports import run_threads
from stretto.comm.topk_all_reduce import TopKAllReduce

EVEN = [Mesh(hosts) for hosts in [(1,), (3,), (2, 2)]]
UNEVEN = [Mesh(hosts) for hosts in [(1, 1, 2), (3, 1, 2)]]
ENCODED = [name for name in ALLREDUCE if name != "native"]
BLOCK = 16


def inputs_of(kind: str, *shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    x = torch.randn(shape)
    match kind:
        case "normal":
            return x
        case "wide":  # magnitudes over twelve orders in one block
            return x * 10.0 ** torch.randint(-6, 7, shape)
        case "cancelling":  # the sum is small, the inputs are not
            return x[:1] * (-1.0) ** torch.arange(shape[0])[:, None] * (1 + 0.01 * x)
        case "halfway":  # every input in the middle between two representable numbers
            return (1 + (1 + 2 * torch.randint(0, 8, shape)) / 16) * 2.0 ** torch.randint(
                -3, 4, shape
            )
        case "one large":
            return torch.where(torch.arange(shape[-1]) % BLOCK == 0, 448.0, 1e-3 * x)
    raise AssertionError(kind)


KINDS = ["normal", "wide", "cancelling", "halfway", "one large"]


def summed(schedule, inputs, codec):
    def work(transport):
        tensor = inputs[transport.rank].clone()
        with CollectiveExecutor(transport) as executor:
            executor.start(executor.prepare(schedule, tensor, codec)).wait()
        return tensor

    return torch.stack(run_threads(schedule.size, work))


@pytest.mark.parametrize("mesh", [*EVEN, *UNEVEN], ids=lambda mesh: str(mesh.ranks_per_host))
@pytest.mark.parametrize("name", ENCODED)
def test_encoded_sums_have_the_same_bits_everywhere(name, mesh):
    for parts, length in [(1, 0), (1, 7), (1, 1031), (3, 1031)]:
        schedule = ALLREDUCE[name](mesh, parts)
        result = summed(schedule, inputs_of("normal", mesh.size, length), Fp8(BLOCK))
        bits = result.view(torch.int32)
        assert torch.equal(bits, bits[:1].expand_as(bits)), (parts, length)


@pytest.mark.parametrize("name", ENCODED)
def test_encoded_sums_are_within_the_stated_error(name):
    mesh, length = Mesh((3, 2)), 307 * len(KINDS)
    schedule = ALLREDUCE[name](mesh, 2)
    inputs = torch.cat([inputs_of(kind, mesh.size, 307) for kind in KINDS], dim=1)
    result = summed(schedule, inputs, Fp8(BLOCK))
    relative_bound = error_bound(schedule, PER_HOP_ERROR) + mesh.size * 2.0**-24
    bounds = chunk_bounds(length, schedule.num_chunks)
    for start, stop in pairwise(bounds):
        for at in range(start, stop, BLOCK):
            block = slice(at, min(at + BLOCK, stop))
            allowed = relative_bound * inputs[:, block].abs().amax(dim=1).double().sum()
            error = (result[:, block] - inputs[:, block].double().sum(dim=0)).abs().max()
            assert error <= allowed


@pytest.mark.parametrize("name", ENCODED)
def test_values_that_are_not_finite_on_one_rank_are_not_finite_on_all(name):
    mesh = Mesh((2, 1))
    inputs = inputs_of("normal", mesh.size, 331)
    bad = [20, 200, 320]
    inputs[1, bad] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    result = summed(ALLREDUCE[name](mesh, 1), inputs, Fp8(BLOCK))
    assert not result[:, bad].isfinite().any()
    assert result[:, 100].isfinite().all()


def scales():
    """Return blocks of every magnitude, including zero and subnormal numbers."""
    exponents = torch.arange(-149, 128)
    random = torch.rand(len(exponents), BLOCK, generator=torch.manual_seed(3)) * 2 - 1
    return torch.cat([torch.zeros(1, BLOCK), torch.ldexp(random, exponents[:, None])])


def bind(values, codec):
    chunks = [values.numel()]
    wire = torch.zeros(codec.num_bytes(chunks), dtype=torch.uint8)
    return codec.bind(
        values, chunks, wire, torch.empty(codec.workspace_numel(chunks, values.device))
    ), wire


def every_threshold():
    """Return blocks whose largest magnitude is near each point where rounding or scale changes."""
    points = torch.arange(64, 129) / 64 * 256
    near = torch.stack([points, points.nextafter(torch.zeros(1)), points.nextafter(2 * points)])
    blocks = near.reshape(-1, 1) * 2.0 ** -torch.arange(BLOCK)
    return torch.cat([blocks, -blocks * 2.0**100, blocks * 2.0**-120])


@pytest.mark.parametrize("make", [scales, every_threshold])
def test_encoding_a_decoded_value_gives_the_same_bytes(make):
    values = make().flatten()
    bound, wire = bind(values, Fp8(BLOCK))
    bound.encode()
    first, rounded = wire.clone(), values.clone()
    bound.encode()
    assert torch.equal(wire, first)
    assert torch.equal(values, rounded)
    values.fill_(7)
    bound.decode()
    assert torch.equal(values, rounded)


@pytest.mark.parametrize("make", [scales, every_threshold])
def test_one_rounding_is_within_the_stated_error(make):
    x = make()
    values = x.flatten().clone()
    bind(values, Fp8(BLOCK))[0].encode()
    error = (values.view_as(x).double() - x.double()).abs()
    largest = x.double().abs().amax(dim=1, keepdim=True)
    allowed = torch.maximum(x.double().abs() / 17, largest / 2**17).clamp(min=2.0**-127)
    assert (error <= allowed).all()
    assert (values.view_as(x)[x == 0] == 0).all()
    # No subnormal values: a processor that flushes them to zero decodes the same bits.
    assert (values[values != 0].abs() >= torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("mesh", EVEN, ids=lambda mesh: str(mesh.ranks_per_host))
@pytest.mark.parametrize("name", ALL_GATHER)
def test_sparse_sums_lose_nothing_and_have_the_same_bits_everywhere(name, mesh, parts):
    length, share, steps = 211, Fraction(3, 100), 4
    gradients = inputs_of("wide", steps, mesh.size, length)

    def work(transport):
        flat, seen = torch.empty(length), []
        with CollectiveExecutor(transport) as executor:
            gather = ALL_GATHER[name](mesh, parts)
            sparse = TopKAllReduce(executor, gather, transport.rank, flat, share)
            for step in range(steps):
                before = sparse.state_dict()["residual"]
                flat.copy_(gradients[step, transport.rank])
                sparse.start().wait()
                seen.append((flat.clone(), before, sparse.state_dict()["residual"]))
        return seen

    histories = run_threads(mesh.size, work)
    for step in range(steps):
        total = torch.zeros(length)
        for rank, history in enumerate(histories):
            _, before, after = history[step]
            x = gradients[step, rank] + before
            sent = torch.where(after == 0, x, 0.0)
            assert torch.equal(sent + after, x)
            assert sent.count_nonzero() == 7
            assert after.double().square().sum() <= (1 - 7 / length) * x.double().square().sum()
            total += sent
        assert all(torch.equal(history[step][0], total) for history in histories)

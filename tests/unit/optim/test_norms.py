"""Norm functions of LARS and LAMB: sums over shards, and norms shared by a group."""

import pytest
import torch
from torch import nn

from stretto.comm.in_process_transports import run_threads
from stretto.comm.transport import all_reduce_small_
from stretto.optim import LAMB, LARS, TrustRatioOptions, local_norms

RANKS = 3


def drawn(step, *shape):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sharded(transport, calls):
    def norms(layers):
        calls.append(len(layers))
        squares = local_norms(layers).square()
        all_reduce_small_(squares, transport)
        return squares.sqrt()

    return norms


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_shards_step_as_the_whole_layer_with_one_message_each(kind):
    shapes, bounds = (
        [(12, 2), (9, 3)],
        [(0, 5, 5, 12), (0, 2, 8, 9)],
    )  # rank 1 has an empty shard of the first

    def steps(norms, shard):
        held = [nn.Parameter(shard(index, drawn(index, *s))) for index, s in enumerate(shapes)]
        optimizer = kind(held, 0.5, weight_decay=0.01, norms=norms)
        for step in range(3):
            for index, p in enumerate(held):
                p.grad = shard(index, drawn(10 * step + index, *shapes[index]))
            optimizer.step()
        return [p.detach() for p in held]

    def on_rank(transport):
        def shard(index, tensor):
            begin, end = bounds[index][transport.rank : transport.rank + 2]
            return tensor[begin:end].clone()

        calls = []
        return steps(sharded(transport, calls), shard), calls

    whole = steps(local_norms, lambda _, tensor: tensor.clone())
    ranks = run_threads(RANKS, on_rank)
    for index, expected in enumerate(whole):
        gathered = torch.cat([parts[index] for parts, _ in ranks])
        torch.testing.assert_close(gathered, expected, rtol=1e-12, atol=1e-12)
    assert [calls for _, calls in ranks] == [[4, 4, 4]] * RANKS


def test_ranks_of_a_group_have_one_ratio_from_the_first_shared_step_on():
    def on_rank(transport):
        step = 0

        def norms(layers):
            norms_here = local_norms(layers)
            if step >= 2:
                all_reduce_small_(norms_here, transport)
                norms_here /= transport.size
            return norms_here

        weight = nn.Parameter(drawn(transport.rank, 4, 4))
        optimizer = LARS([weight], 1.0, trust=TrustRatioOptions(0.1), norms=norms)
        ratios = []
        for step in range(4):
            before = weight.detach().clone()
            weight.grad = drawn(7 + step, 4, 4)
            optimizer.state.clear()  # without momentum, the step shows the ratio
            optimizer.step()
            ratios.append(float(((before - weight) / weight.grad).mean().detach()))
        return ratios

    for step, ratios in enumerate(zip(*run_threads(RANKS, on_rank), strict=True)):
        difference = max(ratios) - min(ratios)
        assert difference < 1e-12 if step >= 2 else difference > 1e-6


def test_norms_are_computed_once_a_step_for_all_groups_with_gradients():
    calls = []

    def norms(layers):
        calls.append([tuple(layer.shape) for layer in layers])
        return local_norms(layers)

    a, b, c = (nn.Parameter(torch.ones(n, 2)) for n in (1, 2, 3))
    groups = [{"params": [a]}, {"params": [b], "adapt": False}, {"params": [c], "trust": 0.1}]
    optimizer = LARS(groups, 0.1, norms=norms)
    optimizer.step()
    b.grad = torch.ones_like(b)
    optimizer.step()
    assert calls == []
    a.grad, c.grad = torch.ones_like(a), torch.ones_like(c)
    optimizer.step()
    assert calls == [[(1, 1, 2), (1, 3, 2)] * 2]


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_layers_step_alike_in_one_group_and_in_several(kind):
    def step(group_bounds):
        held = [nn.Parameter(drawn(n, n + 1, 2)) for n in range(4)]
        groups = [{"params": held[i:j]} for i, j in group_bounds]
        optimizer = kind(groups, 0.5, weight_decay=0.01)
        for index, p in enumerate(held):
            p.grad = drawn(10 + index, *p.shape)
        optimizer.step()
        return [p.detach() for p in held]

    for one, several in zip(step([(0, 4)]), step([(0, 1), (1, 3), (3, 4)]), strict=True):
        assert torch.equal(one, several)


def test_groups_with_different_options_have_different_ratios():
    a, b = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = LARS(
        [{"params": [a]}, {"params": [b], "trust": 0.1}], 1.0, trust=TrustRatioOptions(0.2)
    )
    a.grad, b.grad = torch.ones(2, 2), torch.ones(2, 2)
    optimizer.step()
    assert [float(p.detach()[0, 0]) for p in (a, b)] == pytest.approx([0.8, 0.9])


def test_norms_of_16_bit_layers_are_computed_in_fp32():
    big = torch.full((1, 90_000), 300.0, dtype=torch.float16)  # its norm is beyond fp16
    assert float(local_norms([big])) == pytest.approx(90_000, rel=1e-4)
    assert local_norms([torch.cat([big, big])]).tolist() == [pytest.approx([90_000], rel=1e-4)] * 2
    assert local_norms([torch.empty(1, 0), torch.ones(1)]).tolist() == [[0.0, 1.0]]

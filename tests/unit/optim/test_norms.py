"""Norms from outside: shards that add up, groups that share."""

import pytest
import torch
from torch import nn

from stretto.comm.local import run_local
from stretto.comm.small import add_up_
from stretto.optim import LAMB, LARS, Trust, own_norms

RANKS = 3


def drawn(step, *shape):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sharded(channel, calls):
    def norms(layers):
        calls.append(len(layers))
        squares = own_norms(layers).square()
        add_up_(squares, channel)
        return squares.sqrt()

    return norms


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_shards_make_the_step_of_the_whole_with_one_message_each(kind):
    shapes, cuts = [(12, 2), (9, 3)], [(0, 5, 5, 12), (0, 2, 8, 9)]  # one rank has nothing of one

    def steps(norms, share):
        held = [nn.Parameter(share(index, drawn(index, *s))) for index, s in enumerate(shapes)]
        optimizer = kind(held, 0.5, weight_decay=0.01, norms=norms)
        for step in range(3):
            for index, p in enumerate(held):
                p.grad = share(index, drawn(10 * step + index, *shapes[index]))
            optimizer.step()
        return [p.detach() for p in held]

    def on_rank(channel):
        def share(index, tensor):
            begin, end = cuts[index][channel.rank : channel.rank + 2]
            return tensor[begin:end].clone()

        calls = []
        return steps(sharded(channel, calls), share), calls

    whole = steps(own_norms, lambda _, tensor: tensor.clone())
    ranks = run_local(RANKS, on_rank)
    for index, expected in enumerate(whole):
        together = torch.cat([parts[index] for parts, _ in ranks])
        torch.testing.assert_close(together, expected, rtol=1e-12, atol=1e-12)
    assert [calls for _, calls in ranks] == [[4, 4, 4]] * RANKS


def test_members_of_a_group_have_one_ratio_from_the_step_on_at_which_it_is_switched_on():
    def on_rank(channel):
        step = 0

        def norms(layers):
            mine = own_norms(layers)
            if step >= 2:
                add_up_(mine, channel)
                mine /= channel.size
            return mine

        weight = nn.Parameter(drawn(channel.rank, 4, 4))
        optimizer = LARS([weight], 1.0, trust=Trust(0.1), norms=norms)
        ratios = []
        for step in range(4):
            before = weight.detach().clone()
            weight.grad = drawn(7 + step, 4, 4)
            optimizer.state.clear()  # no momentum: the ratio is what is seen
            optimizer.step()
            ratios.append(float(((before - weight) / weight.grad).mean().detach()))
        return ratios

    for step, ratios in enumerate(zip(*run_local(RANKS, on_rank), strict=True)):
        spread = max(ratios) - min(ratios)
        assert spread < 1e-12 if step >= 2 else spread > 1e-6


def test_norms_are_asked_for_once_a_step_over_all_groups_and_not_without_gradients():
    calls = []

    def norms(layers):
        calls.append([tuple(layer.shape) for layer in layers])
        return own_norms(layers)

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
def test_layers_have_the_same_step_in_one_group_and_in_several(kind):
    def step(cuts):
        held = [nn.Parameter(drawn(n, n + 1, 2)) for n in range(4)]
        groups = [{"params": held[i:j]} for i, j in cuts]
        optimizer = kind(groups, 0.5, weight_decay=0.01)
        for index, p in enumerate(held):
            p.grad = drawn(10 + index, *p.shape)
        optimizer.step()
        return [p.detach() for p in held]

    for one, several in zip(step([(0, 4)]), step([(0, 1), (1, 3), (3, 4)]), strict=True):
        assert torch.equal(one, several)


def test_groups_of_their_own_options_have_ratios_of_their_own():
    a, b = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = LARS([{"params": [a]}, {"params": [b], "trust": 0.1}], 1.0, trust=Trust(0.2))
    a.grad, b.grad = torch.ones(2, 2), torch.ones(2, 2)
    optimizer.step()
    assert [float(p.detach()[0, 0]) for p in (a, b)] == pytest.approx([0.8, 0.9])


def test_norms_of_16_bits_are_taken_in_32():
    big = torch.full((1, 90_000), 300.0, dtype=torch.float16)  # its norm is beyond fp16
    assert float(own_norms([big])) == pytest.approx(90_000, rel=1e-4)
    assert own_norms([torch.cat([big, big])]).tolist() == [pytest.approx([90_000], rel=1e-4)] * 2
    assert own_norms([torch.empty(1, 0), torch.ones(1)]).tolist() == [[0.0, 1.0]]

"""Gradients mixed between groups, and exact averages of models: histories against NumPy."""

import numpy as np
import pytest
import torch

from stretto.comm.in_process_transports import run_threads
from stretto.strategies import CrossoverConfig, build_strategy
from tests.laws.test_gossip import (
    CUTS,
    LR,
    MOMENTUM,
    STEPS,
    WIDTHS,
    Rarely,
    mixed_gradients,
    trained,
)
from tests.laws.test_gossip_groups import SHAPES, Groups, assert_members_equal, assert_same

EXACT = 3


def reading(config, workers, groups):
    """Return the history of steps by mixed gradients, of models that become their mean at times."""
    read, expected = Groups(workers, groups), []
    for step in range(STEPS):
        for group, found in enumerate(mixed_gradients(read, config.build_topology(), step)):
            read.u[group] = [MOMENTUM * u + g for u, g in zip(read.u[group], found, strict=True)]
            read.x[group] = [x - LR * u for x, u in zip(read.x[group], read.u[group], strict=True)]
        if config.averages_exactly_after(step):
            read.x = [[np.mean(layer, axis=0) for layer in zip(*read.x, strict=True)]] * groups
        expected.append(read.copy())
    return expected


def far(models):
    return max(np.abs(model[0] - models[0][0]).max() for model in models)


@pytest.mark.parametrize(("workers", "groups"), [*SHAPES, (4, 4), (4, 1)])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("exact_every", [None, EXACT])
def test_a_groups_gradient_is_mixed_with_those_of_other_groups(workers, groups, reads, exact_every):
    config = CrossoverConfig(
        **CUTS, mix="gradients", seed=3, groups=groups, exact_every=exact_every
    )
    expected = reading(config, workers, groups)
    assert_same(trained(config, workers, reads=reads), expected)
    # Two groups share every gradient; with more of them, the step after an average separates them.
    assert (far(expected[EXACT]) > 1e-4) == (groups > 2)
    assert not exact_every or far(expected[EXACT - 1]) == 0


def test_an_average_of_models_leaves_what_all_share_as_it_is():
    config = CrossoverConfig(**CUTS, mix="gradients", topology="complete", exact_every=EXACT)
    shared = reading(config, 4, 4)
    assert_same(trained(config, 4), shared)
    assert far(shared[-1]) < 1e-12


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("limit", [None, 1e-6])
def test_models_above_the_consensus_limit_are_averaged(limit, reads):
    config = CrossoverConfig(
        **CUTS, mix="gradients", groups=3, consensus_every=1, consensus_limit=limit
    )
    history = trained(config, 6, reads=reads)
    assert_members_equal(history, 3)
    equal = [np.array_equal(a[0], b[0]) for a, b in zip(history[0], history[2], strict=True)]
    # A step measures what it begins with, the next one reads it: two that differ, and one average.
    assert equal == [limit is not None and step % 3 == 2 for step in range(STEPS)]


@pytest.mark.parametrize("reads", [False, True])
def test_what_one_member_alone_has_used_all_groups_update(reads):
    def on_rank(transport):
        config = CrossoverConfig(**CUTS, topology="complete", mix="gradients", groups=2)
        strategy = build_strategy(config, transport)
        strategy.reads_gradients = reads
        model, optimizer = strategy.attach(Rarely(), lambda p: torch.optim.SGD(p, lr=LR))
        strategy.begin(0, 0, True, LR)
        if transport.rank < 2:  # the members of the other group have no samples
            x = torch.ones(1, WIDTHS[0], dtype=torch.float64)
            model(x, rare=transport.rank == 1).sum().backward()
        strategy.after_backward()
        had = {name: p.grad is not None for name, p in model.named_parameters()}
        optimizer.step()
        strategy.after_update()
        strategy.close()
        return had, model.rare.detach(), model.unused.detach()

    found = run_threads(4, on_rank)
    for had, rare, unused in found:
        assert had == {"first.weight": True, "second.weight": True, "rare": True, "unused": False}
        torch.testing.assert_close(rare, found[1][1], rtol=0, atol=1e-12)
        assert not torch.equal(rare, torch.ones_like(rare))
        assert torch.equal(unused, torch.ones_like(unused))

"""Own loops whose micro-batches differ in size: a rank weighs by all its samples of a step."""

import copy

import pytest
import torch
from torch import nn

import stretto
from stretto.comm.in_process_transports import run_threads

generator = torch.Generator().manual_seed(3)
X = torch.randn(12, 6, dtype=torch.float64, generator=generator)
Y = torch.randint(0, 3, (12,), generator=generator)
MODEL = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
MICRO_BATCHES = ((slice(0, 6), slice(6, 8)), (slice(8, 10), slice(10, 12)))
"""Of rank 0, which has 8 samples, and of rank 1, which has 4; the last ones are equally large."""


def loss_of(model, part):
    return nn.functional.cross_entropy(model(X[part]), Y[part]) / 2


def expected_parameters():
    """One process: the ranks' accumulated gradients, weighted by 8 and 4 of 12 samples."""
    model = copy.deepcopy(MODEL)
    loss = sum(
        weight * loss_of(model, part)
        for weight, parts in zip((8 / 12, 4 / 12), MICRO_BATCHES, strict=True)
        for part in parts
    )
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("strategy", ["allreduce", "sharded"])
def test_ranks_weigh_by_the_samples_of_all_their_micro_batches(strategy):
    def work(transport):
        model, optimizer = stretto.distribute(
            copy.deepcopy(MODEL),
            lambda parameters: torch.optim.SGD(parameters, lr=0.5),
            strategy,
            accumulation=2,
            transport=transport,
        )
        for part in MICRO_BATCHES[transport.rank]:
            loss_of(model, part).backward()
        optimizer.step()
        stretto.consolidate(model)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    for found in run_threads(2, work):
        torch.testing.assert_close(found, expected_parameters(), rtol=1e-10, atol=1e-12)

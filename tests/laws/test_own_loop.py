"""A user's own loop, distributed: n ranks equal one rank with the whole batch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.comm.local import run_local
from stretto.data import OrderedBatches
from stretto.errors import ConfigError, StrettoError

NUM_SAMPLES = 41
generator = torch.Generator().manual_seed(0)
DATA = TensorDataset(
    torch.randn(NUM_SAMPLES, 6, dtype=torch.float64, generator=generator),
    torch.randint(0, 3, (NUM_SAMPLES,), generator=generator),
)
INITIAL = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def make_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def epochs(model, optimizer, sampler, count=2):
    for _ in range(count):
        for inputs, targets in DataLoader(DATA, batch_sampler=sampler):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_distributed_loop_equals_the_plain_one(size):
    # Batches of 10 over 41 samples: a last batch of 1 is merged, shares differ in size.
    plain = copy.deepcopy(INITIAL)
    reference = whole_batches(plain, [global_batches(size, epoch) for epoch in range(2)])

    def work(channel):
        model, optimizer = stretto.distribute(
            copy.deepcopy(INITIAL), make_optimizer, channel=channel
        )
        sampler = OrderedBatches(NUM_SAMPLES, 10, rank=channel.rank, size=size)
        return epochs(model, optimizer, sampler)

    results = run_local(size, work)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], reference, rtol=1e-10, atol=1e-12)


def global_batches(size, epoch):
    """Return the global batches of an epoch: the ranks' shares put together."""
    samplers = [OrderedBatches(NUM_SAMPLES, 10, rank=r, size=size) for r in range(size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [[i for share in shares for i in share] for shares in zip(*samplers, strict=True)]


def whole_batches(model, epochs_of_batches):
    optimizer = make_optimizer(model.parameters())
    for batches in epochs_of_batches:
        for indices in batches:
            inputs, targets = DATA[indices]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_accumulated_backward_passes_make_one_step():
    inputs, targets = DATA[:24]

    def work(channel):
        model, optimizer = stretto.distribute(
            copy.deepcopy(INITIAL), make_optimizer, accumulation=3, channel=channel
        )
        mine = inputs[channel.rank :: 2], targets[channel.rank :: 2]
        for part in range(3):
            x, y = (t.tensor_split(3)[part] for t in mine)
            (nn.functional.cross_entropy(model(x), y) / 3).backward()
        optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    reference = copy.deepcopy(INITIAL)
    optimizer = make_optimizer(reference.parameters())
    nn.functional.cross_entropy(reference(inputs), targets).backward()
    optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    torch.testing.assert_close(run_local(2, work)[1], expected, rtol=1e-10, atol=1e-12)


def test_a_second_backward_that_nobody_announced_is_refused():
    def work(channel):
        model, _ = stretto.distribute(copy.deepcopy(INITIAL), make_optimizer, channel=channel)
        for _ in range(2):
            model(DATA[:4][0]).sum().backward()

    with pytest.raises(StrettoError, match="accumulation"):
        run_local(1, work)


def test_an_unknown_strategy_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'allreduce'"):
        stretto.distribute(copy.deepcopy(INITIAL), make_optimizer, "allreduse")

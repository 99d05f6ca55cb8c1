"""A user's own loop, distributed: n ranks equal one rank with the whole batch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.comm.algorithms import ALLREDUCE
from stretto.comm.local import run_local
from stretto.data import OrderedBatches
from stretto.errors import ConfigError, StrettoError
from stretto.strategy import AllReduceConfig

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
@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_a_distributed_loop_equals_the_plain_one(algorithm, size):
    # Batches of 10 over 41 samples: a last batch of 1 is merged, shares differ in size.
    plain = copy.deepcopy(INITIAL)
    reference = whole_batches(plain, [global_batches(size, epoch) for epoch in range(2)])

    def work(channel):
        # Buckets of one tensor each: weights must hold until the last one has been packed.
        how = AllReduceConfig(algorithm=algorithm, fusion=1)
        model, optimizer = stretto.distribute(
            copy.deepcopy(INITIAL), make_optimizer, how, channel=channel
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


INPUTS, TARGETS = DATA[:24]


def loss_of(model, rank=0, size=1):
    mine = slice(rank, None, size)
    return nn.functional.cross_entropy(model(INPUTS[mine]), TARGETS[mine])


def clipped(model, optimizer, rank=0, size=1):
    loss_of(model, rank, size).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def scaled(model, optimizer, rank=0, size=1):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    scaler.scale(loss_of(model, rank, size)).backward()
    scaler.step(optimizer)


def with_closure(model, optimizer, rank=0, size=1):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, rank, size)
        loss.backward()
        return loss

    optimizer.step(closure)


def in_eval_mode(model, optimizer, rank=0, size=1):
    model.eval()
    loss_of(model, rank, size).backward()
    optimizer.step()


def after_a_forward_of_one_rank(model, optimizer, rank=0, size=1):
    if rank == 0:
        model(INPUTS)
    loss_of(model, rank, size).backward()
    optimizer.step()


HABITS = [clipped, scaled, with_closure, in_eval_mode, after_a_forward_of_one_rank]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize("habit", HABITS)
def test_what_people_do_between_backward_and_step_sees_agreed_gradients(habit):
    reference = copy.deepcopy(INITIAL)
    habit(reference, sgd(reference.parameters()))

    def work(channel):
        model, optimizer = stretto.distribute(copy.deepcopy(INITIAL), sgd, channel=channel)
        habit(model, optimizer, channel.rank, channel.size)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    results = run_local(3, work)
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], expected, rtol=1e-10, atol=1e-12)


def test_an_optimizer_that_calls_its_closure_many_times_stays_one_model():
    def work(channel):
        model, optimizer = stretto.distribute(
            copy.deepcopy(INITIAL), lambda p: torch.optim.LBFGS(p, max_iter=5), channel=channel
        )
        with_closure(model, optimizer, channel.rank, channel.size)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first, second = run_local(2, work)
    assert torch.equal(first, second)


class Named(nn.Module):
    """Takes its batch by name, inside a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = copy.deepcopy(INITIAL)

    def forward(self, *, batch):
        return self.inner(batch["inputs"])


def test_samples_are_counted_in_named_and_nested_inputs():
    reference = copy.deepcopy(INITIAL)
    nn.functional.cross_entropy(reference(INPUTS), TARGETS).backward()

    def work(channel):
        model, _ = stretto.distribute(Named(), sgd, channel=channel)
        mine = slice(0, 20) if channel.rank == 0 else slice(20, 24)
        outputs = model(batch={"inputs": INPUTS[mine]})
        nn.functional.cross_entropy(outputs, TARGETS[mine]).backward()
        return model.inner[0].weight.grad

    torch.testing.assert_close(run_local(2, work)[1], reference[0].weight.grad)


def test_a_model_that_is_never_called_has_no_samples_to_weigh():
    def work(channel):
        model, _ = stretto.distribute(copy.deepcopy(INITIAL), sgd, channel=channel)
        model[0].weight.sum().backward()

    with pytest.raises(StrettoError, match="model was not called with a batch"):
        run_local(1, work)


def test_a_distributed_model_can_be_copied_and_the_copy_is_ordinary():
    def work(channel):
        model, _ = stretto.distribute(copy.deepcopy(INITIAL), sgd, channel=channel)
        twin = copy.deepcopy(model)
        twin(INPUTS).sum().backward()
        loss_of(model).backward()
        return model[0].weight.grad

    alone = copy.deepcopy(INITIAL)
    loss_of(alone).backward()
    torch.testing.assert_close(run_local(1, work)[0], alone[0].weight.grad)


def test_parameters_unfrozen_later_are_refused():
    def work(channel):
        frozen = copy.deepcopy(INITIAL)
        frozen[0].weight.requires_grad_(False)
        model, _ = stretto.distribute(frozen, sgd, channel=channel)
        model[0].weight.requires_grad_(True)
        loss_of(model).backward()

    with pytest.raises(StrettoError, match="frozen when the model was distributed"):
        run_local(1, work)


def test_sparse_gradients_travel():
    def work(channel):
        table = nn.Embedding(10, 3, sparse=True)
        with torch.no_grad():
            table.weight.zero_()
        model, _ = stretto.distribute(table, sgd, channel=channel)
        model(torch.tensor([channel.rank, 5])).sum(dim=1).mean().backward()
        return model.weight.grad

    grad = run_local(2, work)[0]
    assert grad[:, 0].tolist() == [0.25, 0.25, 0, 0, 0, 0.5, 0, 0, 0, 0]


def test_complex_parameters_are_refused_by_name():
    model = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="parameter weight is complex"):
        run_local(1, lambda channel: stretto.distribute(model, sgd, channel=channel))


def test_a_large_batch_does_not_overflow_a_narrow_wire():
    def work(channel):
        how = AllReduceConfig(wire="fp16")
        model, _ = stretto.distribute(nn.Linear(1, 1, bias=False), sgd, how, channel=channel)
        (model(torch.full((4096, 1), 40.0))).mean().backward()
        return model.weight.grad.item()

    assert run_local(2, work) == [40.0, 40.0]


def test_settling_makes_batch_statistics_equal():
    def work(channel):
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
        model, _ = stretto.distribute(net, sgd, channel=channel)
        for _ in range(channel.rank + 1):
            model(INPUTS[channel.rank :: 2])
        stretto.settle(model)
        return [b.clone() for b in model.buffers()]

    first, second = run_local(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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

"""A user's own distributed loop: n ranks equal one rank with the whole batch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.collectives.algorithms import ALLREDUCE
from stretto.comm.in_process_transports import run_threads
from stretto.data import DistributedBatchSampler
from stretto.errors import ConfigError, StrettoError
from stretto.strategies import AllReduceConfig

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
    # Batches of 10 over 41 samples: a last batch of 1 is merged, and ranks differ in samples.
    plain = copy.deepcopy(INITIAL)
    reference = whole_batches(plain, [global_batches(size, epoch) for epoch in range(2)])

    def work(transport):
        # One tensor per bucket: gradient weights must stay until the last bucket is packed.
        how = AllReduceConfig(algorithm=algorithm, bucket_bytes=1)
        model, optimizer = stretto.distribute(
            copy.deepcopy(INITIAL), make_optimizer, how, transport=transport
        )
        sampler = DistributedBatchSampler(NUM_SAMPLES, 10, rank=transport.rank, size=size)
        return epochs(model, optimizer, sampler)

    results = run_threads(size, work)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], reference, rtol=1e-10, atol=1e-12)


def global_batches(size, epoch):
    """Return the global batches of an epoch: the samples of all ranks together."""
    samplers = [DistributedBatchSampler(NUM_SAMPLES, 10, rank=r, size=size) for r in range(size)]
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

    def work(transport):
        model, optimizer = stretto.distribute(
            copy.deepcopy(INITIAL), make_optimizer, accumulation=3, transport=transport
        )
        mine = inputs[transport.rank :: 2], targets[transport.rank :: 2]
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
    torch.testing.assert_close(run_threads(2, work)[1], expected, rtol=1e-10, atol=1e-12)


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


COMMON_PATTERNS = [clipped, scaled, with_closure, in_eval_mode, after_a_forward_of_one_rank]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize("pattern", COMMON_PATTERNS)
def test_code_between_backward_and_step_sees_reduced_gradients(pattern):
    reference = copy.deepcopy(INITIAL)
    pattern(reference, sgd(reference.parameters()))

    def work(transport):
        model, optimizer = stretto.distribute(copy.deepcopy(INITIAL), sgd, transport=transport)
        pattern(model, optimizer, transport.rank, transport.size)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    results = run_threads(3, work)
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], expected, rtol=1e-10, atol=1e-12)


def test_with_a_closure_called_many_times_ranks_stay_equal():
    def work(transport):
        model, optimizer = stretto.distribute(
            copy.deepcopy(INITIAL), lambda p: torch.optim.LBFGS(p, max_iter=5), transport=transport
        )
        with_closure(model, optimizer, transport.rank, transport.size)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first, second = run_threads(2, work)
    assert torch.equal(first, second)


class KeywordModel(nn.Module):
    """Takes its batch as a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = copy.deepcopy(INITIAL)

    def forward(self, *, batch):
        return self.inner(batch["inputs"])


def test_samples_are_counted_in_keyword_and_nested_inputs():
    reference = copy.deepcopy(INITIAL)
    nn.functional.cross_entropy(reference(INPUTS), TARGETS).backward()

    def work(transport):
        model, _ = stretto.distribute(KeywordModel(), sgd, transport=transport)
        mine = slice(0, 20) if transport.rank == 0 else slice(20, 24)
        outputs = model(batch={"inputs": INPUTS[mine]})
        nn.functional.cross_entropy(outputs, TARGETS[mine]).backward()
        return model.inner[0].weight.grad

    torch.testing.assert_close(run_threads(2, work)[1], reference[0].weight.grad)


def test_a_model_that_is_never_called_is_an_error():
    def work(transport):
        model, _ = stretto.distribute(copy.deepcopy(INITIAL), sgd, transport=transport)
        model[0].weight.sum().backward()

    with pytest.raises(StrettoError, match="model was not called with a batch"):
        run_threads(1, work)


def test_a_copy_of_a_distributed_model_is_an_ordinary_model():
    def work(transport):
        model, _ = stretto.distribute(copy.deepcopy(INITIAL), sgd, transport=transport)
        twin = copy.deepcopy(model)
        twin(INPUTS).sum().backward()
        loss_of(model).backward()
        return model[0].weight.grad

    single = copy.deepcopy(INITIAL)
    loss_of(single).backward()
    torch.testing.assert_close(run_threads(1, work)[0], single[0].weight.grad)


def test_parameters_unfrozen_later_are_refused():
    def work(transport):
        frozen = copy.deepcopy(INITIAL)
        frozen[0].weight.requires_grad_(False)
        model, _ = stretto.distribute(frozen, sgd, transport=transport)
        model[0].weight.requires_grad_(True)
        loss_of(model).backward()

    with pytest.raises(StrettoError, match="frozen when the model was distributed"):
        run_threads(1, work)


def test_sparse_gradients_are_reduced():
    def work(transport):
        table = nn.Embedding(10, 3, sparse=True)
        with torch.no_grad():
            table.weight.zero_()
        model, _ = stretto.distribute(table, sgd, transport=transport)
        model(torch.tensor([transport.rank, 5])).sum(dim=1).mean().backward()
        return model.weight.grad

    grad = run_threads(2, work)[0]
    assert grad[:, 0].tolist() == [0.25, 0.25, 0, 0, 0, 0.5, 0, 0, 0, 0]


def test_complex_parameters_are_refused_by_name():
    model = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="parameter weight is complex"):
        run_threads(1, lambda transport: stretto.distribute(model, sgd, transport=transport))


def test_a_large_batch_does_not_overflow_a_low_precision_codec():
    def work(transport):
        how = AllReduceConfig(wire="fp16")
        model, _ = stretto.distribute(nn.Linear(1, 1, bias=False), sgd, how, transport=transport)
        (model(torch.full((4096, 1), 40.0))).mean().backward()
        return model.weight.grad.item()

    assert run_threads(2, work) == [40.0, 40.0]


def test_consolidate_makes_batch_statistics_equal():
    def work(transport):
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
        model, _ = stretto.distribute(net, sgd, transport=transport)
        for _ in range(transport.rank + 1):
            model(INPUTS[transport.rank :: 2])
        stretto.consolidate(model)
        return [b.clone() for b in model.buffers()]

    first, second = run_threads(2, work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_undeclared_second_backward_is_refused():
    def work(transport):
        model, _ = stretto.distribute(copy.deepcopy(INITIAL), make_optimizer, transport=transport)
        for _ in range(2):
            model(DATA[:4][0]).sum().backward()

    with pytest.raises(StrettoError, match="accumulation"):
        run_threads(1, work)


def test_an_unknown_strategy_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'allreduce'"):
        stretto.distribute(copy.deepcopy(INITIAL), make_optimizer, "allreduse")

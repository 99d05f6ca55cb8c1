"""n ranks equal one rank with n times the batch, for all-reduce by every algorithm.

Sharded training is compared with one rank in `test_plans.py`.
"""

import copy
import threading
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.collectives.algorithms import ALLREDUCE
from stretto.comm.in_process_transports import run_threads
from stretto.data.loader import Prefetcher
from stretto.data.order import rank_samples
from stretto.data.sample_source import StatelessSource
from stretto.models import per_sample_loss
from stretto.optim import AdamWConfig, LAMBConfig, LARSConfig, SGDConfig, make_optimizer
from stretto.strategies import AllReduceConfig, build_strategy
from stretto.telemetry.timeline import Recorder
from stretto.train.config import TrainConfig
from stretto.train.run_parts import RunParts
from stretto.train.step import forward_backward, iterate_rank_samples, update
from stretto.train.step_consensus import ControlPlane, StepConsensus

STEPS = 6
_BUILDING = threading.Lock()


class Points(StatelessSource):
    """A small classification task in float64."""

    fingerprint = "points"

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.num_samples = num_samples
        self._x = torch.randn(num_samples, 6, dtype=torch.float64, generator=generator)
        self._y = (self._x[:, 0] * self._x[:, 1] > 0).long()

    def batch(self, indices, epoch=0):
        picked = torch.from_numpy(np.asarray(indices))
        return self._x[picked], self._y[picked]


class UnreadablePoints(Points):
    """The same task, but a third of the samples cannot be read."""

    def batch(self, indices, epoch=0):
        return super().batch(indices[indices % 3 > 0])


class SometimesUnused(nn.Module):
    """Has a parameter that no forward uses, and one that only large inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(6, 5)
        self.rare = nn.Linear(5, 5)
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if bool((x[:, 0] > 1.5).any()):
            hidden = hidden + torch.where((x[:, :1] > 1.5), self.rare(hidden), 0.0)
        return self.last(hidden)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


@cache
def _initial(make) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def built(make) -> nn.Module:
    """Return a new copy of one initial model; ranks are threads and share the generator."""
    with _BUILDING:
        return copy.deepcopy(_initial(make))


def run_rank(
    transport,
    *,
    make,
    algorithm,
    batch,
    num_samples,
    accumulation,
    wire="own",
    clip_norm=None,
    data=Points,
    optim=None,
):
    """Train as the loop does; return the parameters by name."""
    strategy = build_strategy(
        AllReduceConfig(algorithm=algorithm, bucket_bytes=200, wire=wire), transport
    )
    strategy.reads_gradients = clip_norm is not None
    model = built(make)
    model, optimizer = strategy.attach(model, making(optim, model))
    parts = RunParts(
        config=TrainConfig(
            batch=batch, steps=STEPS, accumulation=accumulation, clip_norm=clip_norm
        ),
        seed=3,
        world=World(transport.rank, Mesh((transport.size,))),
        transport=transport,
        model=model,
        optimizer=optimizer,
        strategy=strategy,
        source=data(num_samples),
        test_source=Points(1),
        rate_at=lambda step: 0.1 / (1 + step),
        report=lambda event: None,
        recorder=Recorder(transport.rank),
    )
    agreement = StepConsensus(ControlPlane(transport))
    with Prefetcher(parts.source, iterate_rank_samples(parts, 0)) as batches:
        for step, loaded in enumerate(batches):
            forward_backward(parts, step, loaded, parts.rate_at(step), agreement)
            step_gradients = strategy.after_backward()
            update(parts, step, step_gradients)
            strategy.after_update()
    strategy.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def making(optim, model):
    """Return the optimizer factory of a config; torch's SGD if there is none."""
    if optim is not None:
        return make_optimizer(optim, model)
    return lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)


def on_one_rank(*, make, batch, num_samples, clip_norm=None, data=Points, optim=None):
    """Train with plain PyTorch on whole batches; only the order of samples is stretto's."""
    model, source = built(make), data(num_samples)
    optimizer = making(optim, model)(model.parameters())
    per_epoch = -(-num_samples // batch)
    for step in range(STEPS):
        local_samples = rank_samples(
            step % per_epoch,
            batch=batch,
            rank=0,
            size=1,
            num_samples=num_samples,
            seed=3,
            epoch=step // per_epoch,
        )
        inputs, targets = source.batch(local_samples.samples)
        optimizer.zero_grad()
        per_sample_loss(model(inputs), targets).mean().backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_equal_models(model, reference, tolerance=1e-10):
    for name, value in reference.items():
        error = (model[name] - value).norm() / value.norm()
        assert error <= tolerance, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("algorithm", ALLREDUCE)
@pytest.mark.parametrize("make", [plain, SometimesUnused])
def test_n_ranks_equal_one_rank_with_n_times_the_batch(algorithm, size, make):
    case = {"make": make, "batch": 12, "num_samples": 45}
    reference = on_one_rank(**case)
    for accumulation in (1, 3):
        models = run_threads(
            size,
            lambda transport, a=accumulation: run_rank(
                transport, algorithm=algorithm, accumulation=a, **case
            ),
        )
        assert_equal_models(models[0], reference)
        for model in models[1:]:
            assert all(torch.equal(model[name], models[0][name]) for name in reference)


OPTIMIZERS = [
    SGDConfig(order="inside", momentum_correction=True, weight_decay=0.01),
    LARSConfig(trust=0.1, weight_decay=0.01),
    LAMBConfig(weight_decay=0.01),
    AdamWConfig(weight_decay=0.01),
]


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: optim.kind)
def test_ranks_times_micro_batches_equal_the_whole_batch_under_every_optimizer(optim, size):
    case = {"make": SometimesUnused, "batch": 12, "num_samples": 45, "optim": optim}
    reference = on_one_rank(**case)
    for accumulation in (1, 3):
        models = run_threads(
            size,
            lambda transport, a=accumulation: run_rank(
                transport, algorithm="ring", accumulation=a, **case
            ),
        )
        assert_equal_models(models[-1], reference)


@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_ranks_without_samples_change_nothing(algorithm):
    # Batches of 3 and a last one of 1 over 5 ranks: in every step some rank has no samples.
    case = {"make": plain, "batch": 3, "num_samples": 10}
    models = run_threads(
        5, lambda transport: run_rank(transport, algorithm=algorithm, accumulation=2, **case)
    )
    assert_equal_models(models[3], on_one_rank(**case))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_unreadable_samples_have_no_effect(size):
    case = {"make": plain, "batch": 12, "num_samples": 45, "data": UnreadablePoints}
    models = run_threads(
        size, lambda transport: run_rank(transport, algorithm="ring", accumulation=2, **case)
    )
    assert_equal_models(models[0], on_one_rank(**case))


@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_updating_per_bucket_equals_updating_at_the_end(algorithm):
    case = {
        "make": plain,
        "algorithm": algorithm,
        "batch": 12,
        "num_samples": 45,
        "accumulation": 2,
    }
    early = run_threads(3, lambda transport: run_rank(transport, **case))[1]
    # The clip norm is never reached, but makes the update wait for all gradients.
    late = run_threads(3, lambda transport: run_rank(transport, clip_norm=1e9, **case))[1]
    assert all(torch.equal(early[name], late[name]) for name in early)


@pytest.mark.parametrize("size", [1, 3])
def test_clipping_uses_the_norm_of_the_global_gradient(size):
    case = {"make": plain, "batch": 12, "num_samples": 45, "clip_norm": 0.05}
    models = run_threads(
        size, lambda transport: run_rank(transport, algorithm="ring", accumulation=1, **case)
    )
    assert_equal_models(models[0], on_one_rank(**case))


def test_an_unused_parameter_has_no_gradient_and_is_not_decayed():
    case = {"make": SometimesUnused, "batch": 12, "num_samples": 45}
    models = run_threads(
        3, lambda transport: run_rank(transport, algorithm="ring", accumulation=1, **case)
    )
    assert torch.equal(models[2]["never"], torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_with_batch_norm_n_ranks_equal_n_replicas_run_in_sequence(algorithm, size):
    models = run_threads(
        size,
        lambda transport: run_rank(
            transport,
            make=with_norm,
            algorithm=algorithm,
            batch=4 * size,
            num_samples=8 * size,
            accumulation=1,
        ),
    )
    assert_equal_models(models[0], replicas_in_sequence(size))


def replicas_in_sequence(size):
    replicas = [built(with_norm) for _ in range(size)]
    optimizers = [
        torch.optim.SGD(r.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01) for r in replicas
    ]
    source, batch, num_samples = Points(8 * size), 4 * size, 8 * size
    for step in range(STEPS):
        for rank, replica in enumerate(replicas):
            local_samples = rank_samples(
                step % 2,
                batch=batch,
                rank=rank,
                size=size,
                num_samples=num_samples,
                seed=3,
                epoch=step // 2,
            )
            inputs, targets = source.batch(local_samples.samples)
            replica.zero_grad()
            (per_sample_loss(replica(inputs), targets).sum() / batch).backward()
        gradients = zip(*([p.grad for p in r.parameters()] for r in replicas), strict=True)
        sums = [sum(of_ranks[1:], of_ranks[0]) for of_ranks in gradients]
        for replica, optimizer in zip(replicas, optimizers, strict=True):
            for parameter, total in zip(replica.parameters(), sums, strict=True):
                parameter.grad = total.clone()
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step()
    return {name: p.detach() for name, p in replicas[0].named_parameters()}


@pytest.mark.parametrize(("wire", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-2), ("fp16", 1e-2)])
def test_a_lower_precision_codec_is_close_and_equal_on_all_ranks(wire, tolerance):
    case = {"make": plain, "batch": 12, "num_samples": 45}
    models = run_threads(
        4,
        lambda transport: run_rank(transport, algorithm="ring", accumulation=1, wire=wire, **case),
    )
    reference = on_one_rank(**case)
    assert_equal_models(models[0], reference, tolerance)
    assert all(torch.equal(models[3][name], models[0][name]) for name in reference)
    assert any(not torch.equal(models[0][name], reference[name]) for name in reference)


@pytest.mark.parametrize(
    ("algorithm", "size"), [("ring", 1), *((name, 3) for name in ALLREDUCE if name != "native")]
)
def test_fp8_is_close_and_equal_on_all_ranks(algorithm, size):
    case = {"make": plain, "batch": 12, "num_samples": 45}
    models = run_threads(
        size, lambda c: run_rank(c, algorithm=algorithm, accumulation=1, wire="fp8", **case)
    )
    reference = on_one_rank(**case)
    assert_equal_models(models[0], reference, 0.1)
    for model in models[1:]:
        assert all(torch.equal(model[name], models[0][name]) for name in reference)


@pytest.mark.parametrize("size", [1, 4])
def test_topk_leaves_all_ranks_equal(size):
    case = {"make": plain, "batch": 12, "num_samples": 45}
    models = run_threads(
        size, lambda c: run_rank(c, algorithm="ring", accumulation=2, wire="topk 10%", **case)
    )
    reference = on_one_rank(**case)
    for model in models[1:]:
        assert all(torch.equal(model[name], models[0][name]) for name in reference)
    assert any(not torch.equal(models[0][name], reference[name]) for name in reference)


def test_topk_with_all_entries_is_the_exact_sum():
    case = {"make": plain, "batch": 12, "num_samples": 45}
    models = run_threads(
        3, lambda c: run_rank(c, algorithm="ring", accumulation=1, wire="topk 100%", **case)
    )
    assert_equal_models(models[2], on_one_rank(**case), 1e-5)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "fp8", "topk 10%"])
def test_with_any_codec_an_unused_parameter_has_no_gradient(wire):
    case = {"make": SometimesUnused, "batch": 12, "num_samples": 45}
    models = run_threads(
        3, lambda c: run_rank(c, algorithm="ring", accumulation=1, wire=wire, **case)
    )
    # With a gradient of zeros, weight decay would still change it.
    assert torch.equal(models[1]["never"], torch.ones(3, dtype=torch.float64))
    for model in models[1:]:
        assert all(torch.equal(model[name], models[0][name]) for name in model)

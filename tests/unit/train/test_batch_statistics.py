"""Re-estimated batch statistics equal those of one rank that saw all batches."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.data import open_sample_source
from stretto.run import PreparedRun, RunConfig, assemble
from stretto.train.evaluate import StatisticsSampling, evaluate, reestimate_batch_norm
from stretto.train.loop import train
from stretto.train.state import consolidated_model


def samples_of_ranks(parts, done):
    look = StatisticsSampling(parts.config, parts.source, parts.seed, done, parts.transport.size)
    return look.rank_samples(parts.transport.rank)


class CountingLayer(nn.Module):
    """Counts its training forwards in a buffer, a statistic that is not of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return x


REESTIMATED = "train.statistics=reestimate"


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 2, stride=2),
        nn.BatchNorm2d(4, momentum=0.3),
        CountingLayer(),
        *more,
        nn.Flatten(),
        nn.Linear(4, 8),
    )


def on_ranks(size, work, *settings, model=None):
    """Return the results of ``work(parts)`` on each of ``size`` ranks."""
    data = ["data.samples=50", "data.test_samples=6", "data.size=8", "optim.lr=0.05"]
    loaded = load(RunConfig, None, [*data, "train.batch=12", "train.log_every=1000", *settings])
    sources = [open_sample_source(loaded.config.data, train=part) for part in (True, False)]
    models = [copy.deepcopy(model or network()) for _ in range(size)]

    def on_rank(transport):
        world, prepared = (
            World(transport.rank, Mesh((size,))),
            PreparedRun(*sources, models[transport.rank]),
        )
        parts = assemble(loaded, prepared, world, transport, lambda event: None)
        result = work(parts)
        parts.strategy.close()
        return result

    return run_threads(size, on_rank)


def estimated(parts, done=3):
    with consolidated_model(parts):
        reestimate_batch_norm(parts, done)
        return {name: buffer.clone() for name, buffer in parts.model.named_buffers()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_together_get_the_statistics_of_one_rank_with_the_same_batches(size):
    ranks = on_ranks(size, estimated, REESTIMATED, "train.statistics_batches=2")
    same_batches = [
        REESTIMATED,
        f"train.statistics_batches={2 * size}",
        f"train.accumulation={size}",
    ]
    (single,) = on_ranks(1, estimated, *same_batches)
    assert all(same(ranks[0], rank) for rank in ranks)
    for name, buffer in single.items():
        torch.testing.assert_close(ranks[0][name], buffer, rtol=1e-6, atol=0)


def test_the_first_layer_gets_mean_and_variance_of_all_samples_together():
    def work(parts):
        samples = np.concatenate([share.samples for share in samples_of_ranks(parts, 3)])
        return estimated(parts), samples, parts

    results = on_ranks(3, work, REESTIMATED, "train.statistics_batches=4")
    samples = np.concatenate([samples for _, samples, _ in results])
    found, _, parts = results[0]
    assert len(set(samples.tolist())) == 48
    with torch.no_grad():
        values = parts.model[0](parts.source.batch(samples)[0]).double()
    mean, variance = values.mean(dim=(0, 2, 3)), values.var(dim=(0, 2, 3))
    torch.testing.assert_close(found["1.running_mean"].double(), mean, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found["1.running_var"].double(), variance, rtol=1e-5, atol=0)


def test_only_batch_norms_get_new_statistics_and_batch_counts_stay():
    def work(parts):
        with consolidated_model(parts):
            before = {name: buffer.clone() for name, buffer in parts.model.named_buffers()}
        after = estimated(parts)
        return {name for name in before if not torch.equal(before[name], after[name])}

    moved = {f"{layer}.running_{which}" for layer in (1, 4) for which in ("mean", "var")}
    assert on_ranks(2, work) == [moved] * 2


def test_earlier_statistics_that_are_not_finite_have_no_effect():
    def work(parts):
        parts.model[1].running_mean.fill_(torch.nan)
        return estimated(parts)

    assert same(on_ranks(1, work)[0], on_ranks(1, estimated)[0])


def test_settings_hooks_buffers_and_random_numbers_are_restored():
    def work(parts):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        state = parts.model.state_dict()
        before = {name: value.clone() for name, value in state.items()}
        evaluate(parts, 3)
        assert same(before, parts.model.state_dict())
        assert parts.model.training
        assert [parts.model[i].momentum for i in (1, 4)] == [0.1, 0.3]
        assert not any(module._forward_hooks for module in parts.model.modules())
        return torch.rand(1).item(), random.random(), np.random.rand()

    dropout = network(nn.Dropout(0.5))
    drawn = on_ranks(1, work, "train.statistics=reestimate", model=dropout)
    assert drawn == on_ranks(1, work, "train.statistics=average", model=dropout)


def test_another_step_reads_other_samples_as_training_would():
    def work(parts):
        return [
            [(share.samples.tolist(), share.epoch) for share in samples_of_ranks(parts, done)]
            for done in steps
        ]

    steps = (5, 6, 5)
    ((five, six, again),) = on_ranks(1, work)  # a pass has five steps
    assert five == again
    assert [samples for samples, _ in five] != [samples for samples, _ in six]
    assert ({epoch for _, epoch in five}, {epoch for _, epoch in six}) == ({0}, {1})


@pytest.mark.parametrize(
    ("setting", "length"), [("accumulation=1", 6), ("accumulation=3", 2), ("micro_batch=4", 3)]
)
def test_batches_are_as_large_as_micro_batches_of_training(setting, length):
    def work(parts):
        return {len(share.samples) for share in samples_of_ranks(parts, 1)}

    assert on_ranks(2, work, f"train.{setting}") == [{length}] * 2


def test_a_model_without_batch_norms_is_not_run():
    def work(parts):
        parts.model.register_forward_hook(lambda *_: pytest.fail("was run"))
        reestimate_batch_norm(parts, 1)

    on_ranks(2, work, model=nn.Sequential(nn.Flatten(), nn.Linear(192, 8)))


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_evaluated_this_way_after_every_step_equals_one_that_never_was(size):
    def work(parts):
        train(parts)
        return parts.model.state_dict()

    settings = ["train.steps=4", "train.save_every=1000", "train.statistics=reestimate"]
    looked_at = on_ranks(size, work, *settings, "train.eval_every=1")
    single = on_ranks(size, work, *settings[:2], "train.eval_every=1000")
    assert all(same(one, other) for one, other in zip(looked_at, single, strict=True))


def test_evaluation_uses_the_new_statistics():
    def work(parts):
        return evaluate(parts, 3).loss

    losses = [on_ranks(2, work, f"train.statistics={how}") for how in ("average", "reestimate")]
    assert losses[0][0] == losses[0][1] != losses[1][0] == losses[1][1]

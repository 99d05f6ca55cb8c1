"""Statistics from training samples: those of one rank that saw all, and no trace of it after."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.comm.local import run_local
from stretto.config import load
from stretto.data import open_source
from stretto.run import Prepared, RunConfig, assemble
from stretto.train.evaluate import evaluate
from stretto.train.loop import train
from stretto.train.settled import settled
from stretto.train.statistics import Look, reestimate


def shares(parts, done):
    look = Look(parts.config, parts.source, parts.seed, done, parts.channel.size)
    return look.shares(parts.channel.rank)


class Habit(nn.Module):
    """Counts what it sees in training: a statistic that is nobody's business here."""

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
        Habit(),
        *more,
        nn.Flatten(),
        nn.Linear(4, 8),
    )


def on_ranks(size, work, *settings, model=None):
    """Return ``work(parts)`` of each of ``size`` ranks."""
    data = ["data.samples=50", "data.test_samples=6", "data.size=8", "optim.lr=0.05"]
    loaded = load(RunConfig, None, [*data, "train.batch=12", "train.log_every=1000", *settings])
    sources = [open_source(loaded.config.data, train=part) for part in (True, False)]
    models = [copy.deepcopy(model or network()) for _ in range(size)]

    def on_rank(channel):
        world, prepared = (
            World(channel.rank, Mesh((size,))),
            Prepared(*sources, models[channel.rank]),
        )
        parts = assemble(loaded, prepared, world, channel, lambda event: None)
        result = work(parts)
        parts.strategy.close()
        return result

    return run_local(size, on_rank)


def estimated(parts, done=3):
    with settled(parts):
        reestimate(parts, done)
        return {name: buffer.clone() for name, buffer in parts.model.named_buffers()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_together_find_what_one_rank_finds_in_the_same_batches(size):
    ranks = on_ranks(size, estimated, REESTIMATED, "train.statistics_batches=2")
    same_batches = [
        REESTIMATED,
        f"train.statistics_batches={2 * size}",
        f"train.accumulation={size}",
    ]
    (alone,) = on_ranks(1, estimated, *same_batches)
    assert all(same(ranks[0], rank) for rank in ranks)
    for name, buffer in alone.items():
        torch.testing.assert_close(ranks[0][name], buffer, rtol=1e-6, atol=0)


def test_the_first_layer_has_mean_and_variance_of_all_samples_as_if_they_were_one_batch():
    def work(parts):
        samples = np.concatenate([share.samples for share in shares(parts, 3)])
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


def test_only_batch_norms_get_new_statistics_and_counts_stay():
    def work(parts):
        with settled(parts):
            before = {name: buffer.clone() for name, buffer in parts.model.named_buffers()}
        after = estimated(parts)
        return {name for name in before if not torch.equal(before[name], after[name])}

    moved = {f"{layer}.running_{which}" for layer in (1, 4) for which in ("mean", "var")}
    assert on_ranks(2, work) == [moved] * 2


def test_what_was_not_finite_is_not_mixed_in():
    def work(parts):
        parts.model[1].running_mean.fill_(torch.nan)
        return estimated(parts)

    assert same(on_ranks(1, work)[0], on_ranks(1, estimated)[0])


def test_settings_hooks_buffers_and_random_numbers_are_as_before():
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


def test_another_step_looks_at_other_samples_and_shows_them_as_training_would():
    def work(parts):
        return [
            [(share.samples.tolist(), share.epoch) for share in shares(parts, done)]
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
        return {len(share.samples) for share in shares(parts, 1)}

    assert on_ranks(2, work, f"train.{setting}") == [{length}] * 2


def test_a_model_without_batch_norms_is_not_run():
    def work(parts):
        parts.model.register_forward_hook(lambda *_: pytest.fail("was run"))
        reestimate(parts, 1)

    on_ranks(2, work, model=nn.Sequential(nn.Flatten(), nn.Linear(192, 8)))


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_evaluated_so_after_every_step_is_one_that_never_was(size):
    def work(parts):
        train(parts)
        return parts.model.state_dict()

    pace = ["train.steps=4", "train.save_every=1000", "train.statistics=reestimate"]
    looked_at = on_ranks(size, work, *pace, "train.eval_every=1")
    alone = on_ranks(size, work, *pace[:2], "train.eval_every=1000")
    assert all(same(one, other) for one, other in zip(looked_at, alone, strict=True))


def test_evaluation_uses_them():
    def work(parts):
        return evaluate(parts, 3).loss

    losses = [on_ranks(2, work, f"train.statistics={how}") for how in ("average", "reestimate")]
    assert losses[0][0] == losses[0][1] != losses[1][0] == losses[1][1]

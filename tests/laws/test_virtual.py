"""Virtual workers are the real ones: models, statistics and evaluations, in every strategy."""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.comm.local import run_local
from stretto.config import load
from stretto.data import open_source
from stretto.errors import ConfigError
from stretto.run import Prepared, RunConfig, assemble
from stretto.strategy import STRATEGIES
from stretto.strategy.adpsgd.strategy import ADPSGD
from stretto.telemetry.events import EvalDone
from stretto.topology import random_events
from stretto.train.loop import train
from stretto.train.loose import LAG
from stretto.virtual import train_virtually
from stretto.virtual.consensus import StackedConsensus
from stretto.virtual.repeated import RECORDS, one_by_one
from tests.laws.test_adpsgd import InOrder

STEPS, WORKERS, EVAL_EVERY, SEED = 10, 4, 5, 5
SAMPLES, BATCH = 44, 16

RUNS = {
    "allreduce": [[]],
    "sharded": [["strategy.plan=zero2"]],
    "crossover": [
        [],
        ["strategy.delay=1", "strategy.segments=whole"],
        ["strategy.delay=2", "strategy.every=2", "strategy.topology=one-peer-exponential"],
        ["strategy.topology=base", "strategy.wire=bf16"],
        ["strategy.groups=2", "strategy.delay=1"],
        ["strategy.groups=1"],
        ["strategy.exact_every=3"],
        ["strategy.exact_every=3", "strategy.delay=1", "strategy.consensus_every=2"],
        ["strategy.exact_every=3", "strategy.delay=2", "strategy.every=2", "strategy.groups=2"],
        ["strategy.wire=fp8", "strategy.exact_every=4"],
        ["strategy.wire=fp8", "strategy.delay=1", "strategy.groups=2"],
        ["strategy.consensus_every=1", "strategy.consensus_limit=0.01"],
        ["strategy.consensus_every=2", "strategy.consensus_limit=0.005", "strategy.delay=1"],
        [
            "strategy.consensus_every=1",
            "strategy.consensus_limit=0.002",
            "strategy.consensus_sample=0.2",
            "strategy.exact_every=4",
            "strategy.groups=2",
            "strategy.every=3",  # two groups that have just met are equal
        ],
    ],
    "dpsgd": [[], ["strategy.topology=static-exponential", "strategy.segments=fine"]],
    "sgp": [
        [],
        ["strategy.delay=1"],
        ["strategy.delay=2", "strategy.segments=coarse", "strategy.groups=2"],
        ["strategy.exact_every=3", "strategy.delay=1"],
        ["strategy.consensus_every=1", "strategy.consensus_limit=0.003"],
    ],
    "local_sgd": [["strategy.every=3"]],
    "post_local": [["strategy.every=3", "strategy.from_step=4"]],
    "slowmo": [["strategy.every=4"]],
    "diloco": [
        ["strategy.every=4"],
        ["strategy.every=4", "strategy.fragments=2", "strategy.delay=1", "strategy.mix=0.5"],
    ],
    "noloco": [["strategy.every=3"]],
}
CASES = [(kind, more) for kind, runs in RUNS.items() for more in runs]


class Wide(nn.Module):
    """Computes in float64, with batch statistics, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 4, stride=4)
        self.norm = nn.BatchNorm2d(4)
        self.twice = nn.Linear(16, 16)
        self.last = nn.Linear(16, 8)
        self.double()

    def forward(self, x):
        hidden = torch.relu(self.norm(self.conv(x.double()))).flatten(1)
        return self.last(self.twice(torch.tanh(self.twice(hidden))))


def loaded_run(folder, *more):
    data = [f"data.samples={SAMPLES}", "data.test_samples=14", "data.size=8"]
    data += [f"train.batch={BATCH}"]
    pace = [f"train.steps={STEPS}", f"train.eval_every={EVAL_EVERY}", "train.save_every=1000"]
    rate = ["optim.lr=0.05", "optim.weight_decay=0.01", "optim.decay=cosine"]
    return load(RunConfig, None, [*data, *pace, *rate, f"run.folder={folder}", *more])


def initial():
    torch.manual_seed(0)
    return Wide()


def sources(loaded):
    return [open_source(loaded.config.data, train=part) for part in (True, False)]


def real(loaded, workers):
    """Train real ranks, as threads; return their evaluations."""
    model, opened = initial(), sources(loaded)
    models = [copy.deepcopy(model) for _ in range(workers)]
    told = []

    def on_rank(channel):
        report = told.append if channel.rank == 0 else lambda event: None
        prepared = Prepared(*opened, models[channel.rank])
        world = World(channel.rank, Mesh((workers,)))
        parts = assemble(loaded, prepared, world, channel, report)
        train(replace(parts, checkpoints=None))
        parts.strategy.close()

    run_local(workers, on_rank)
    return [event for event in told if isinstance(event, EvalDone)]


def virtual(loaded, workers):
    return train_virtually(loaded.config, Prepared(*sources(loaded), initial()), workers)


def assert_same(loaded, workers=WORKERS):
    expected, found = real(loaded, workers), virtual(loaded, workers).evaluations
    assert len(expected) == len(found) == 2
    for wanted, seen in zip(expected, found, strict=True):
        assert (seen.step, seen.accuracy) == (wanted.step, wanted.accuracy)
        for name in ("loss", "own_loss", "apart"):
            one, other = getattr(seen, name), getattr(wanted, name)
            assert one == (None if other is None else pytest.approx(other, rel=0, abs=1e-9)), name


@pytest.mark.parametrize(("kind", "more"), CASES, ids=[" ".join([k, *m]) for k, m in CASES])
def test_virtual_workers_learn_what_real_ones_do(tmp_path, kind, more):
    assert_same(loaded_run(tmp_path, f"strategy.kind={kind}", "optim.momentum=0.9", *more))


LIMITED = [(kind, more) for kind, more in CASES if any("consensus_limit" in one for one in more)]


@pytest.mark.parametrize(("kind", "more"), LIMITED, ids=[" ".join([k, *m]) for k, m in LIMITED])
def test_a_limit_that_is_compared_is_one_that_is_passed(tmp_path, monkeypatch, kind, more):
    """Else the comparison above would say nothing about what follows from it."""
    asked, end = [], StackedConsensus.end

    def note(self, step, *, met):
        end(self, step, met=met)
        asked.append(self.asks)

    monkeypatch.setattr(StackedConsensus, "end", note)
    virtual(loaded_run(tmp_path, f"strategy.kind={kind}", "optim.momentum=0.9", *more), WORKERS)
    assert any(asked)


@pytest.mark.parametrize(
    "more",
    [
        ["optim.momentum=0.9"],
        ["optim.kind=lars", "optim.trust=0.02", "optim.momentum=0.9"],
        ["optim.kind=adamw", "train.clip_norm=0.5", "train.accumulation=2"],
        ["train.statistics=reestimate", "train.statistics_batches=2"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("workers", [WORKERS, 3, 1])
def test_in_an_order_that_is_drawn_they_learn_what_real_ones_do_in_it(
    tmp_path, monkeypatch, workers, more
):
    epoch_steps = SAMPLES // BATCH + 1
    meet = sorted({0, *range(EVAL_EVERY, STEPS + 1, EVAL_EVERY), *range(0, STEPS, epoch_steps)})
    order = InOrder(
        event
        for first, end in pairwise(meet)
        for event in random_events(workers, end - first, SEED, first=first, ahead=LAG)
    )
    attach = ADPSGD.attach

    def attach_in_order(self, *args):
        self.turn = order.turn_of(self._channel.rank)
        return attach(self, *args)

    monkeypatch.setattr(ADPSGD, "attach", attach_in_order)
    adpsgd = ["strategy.kind=adpsgd", f"strategy.seed={SEED}"]
    assert_same(loaded_run(tmp_path, *adpsgd, *more), workers)


def test_another_seed_is_another_order(tmp_path):
    one, same, other = (
        virtual(loaded_run(tmp_path, "strategy.kind=adpsgd", f"strategy.seed={seed}"), WORKERS)
        for seed in (1, 1, 2)
    )
    assert one.losses == same.losses != other.losses
    assert len(one.losses) == len(one.apart) == STEPS


def test_every_strategy_is_compared():
    assert {*RUNS, "adpsgd"} == set(STRATEGIES)


@pytest.mark.parametrize("kind", ["crossover", "sgp", "allreduce"])
@pytest.mark.parametrize(
    "more",
    [
        ["train.clip_norm=0.5", "optim.momentum=0.9"],
        ["train.accumulation=2", "train.label_smoothing=0.1"],
        ["train.statistics=reestimate", "train.statistics_batches=2"],
        ["optim.kind=lars", "optim.trust=0.02", "optim.momentum=0.9"],
        ["optim.kind=lamb"],
        ["optim.kind=adamw"],
    ],
    ids=" ".join,
)
def test_with_every_optimizer_and_what_else_a_step_has(tmp_path, kind, more):
    assert_same(loaded_run(tmp_path, f"strategy.kind={kind}", *more))


def test_one_worker_and_workers_of_unequal_shares(tmp_path):
    loaded = loaded_run(tmp_path, "strategy.kind=crossover")
    assert_same(loaded, workers=1)
    assert_same(loaded, workers=3)


@pytest.mark.parametrize(
    "more",
    [
        ["strategy.kind=crossover"],
        ["strategy.kind=crossover", "strategy.groups=2", "train.accumulation=2"],
        ["strategy.kind=sgp", "strategy.delay=1", "train.label_smoothing=0.1"],
        ["strategy.kind=allreduce", "optim.momentum=0.9"],
    ],
    ids=" ".join,
)
def test_steps_that_are_recorded_once_and_repeated_are_the_same(tmp_path, monkeypatch, more):
    """The last step of an epoch is smaller, and is none of those."""
    loaded, times = loaded_run(tmp_path, *more), []
    expected = virtual(loaded, WORKERS)

    def record(lanes):
        again = one_by_one(lanes)
        again()  # to be recorded is to be done, and must leave no trace
        return lambda: (times.append(1), again())

    monkeypatch.setitem(RECORDS, "cpu", record)
    found = virtual(loaded, WORKERS)
    assert len(times) == STEPS - STEPS // 3
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    for one, other in zip(found.evaluations, expected.evaluations, strict=True):
        assert (one.loss, one.apart or 0) == pytest.approx((other.loss, other.apart or 0), rel=1e-9)


def test_how_far_models_are_apart_is_seen_all_along(tmp_path):
    outcome = virtual(loaded_run(tmp_path, "strategy.kind=crossover"), WORKERS)
    assert [step for step, _ in outcome.apart] == list(range(1, STEPS + 1))
    assert outcome.apart[-1] == (STEPS, outcome.evaluations[-1].apart)
    assert virtual(loaded_run(tmp_path), WORKERS).apart == ()
    long = virtual(loaded_run(tmp_path, "strategy.kind=sgp", "train.steps=120"), WORKERS)
    assert [step for step, _ in long.apart] == list(range(3, 121, 3))


def test_a_loss_that_is_not_finite_is_an_outcome(tmp_path):
    outcome = virtual(loaded_run(tmp_path, "strategy.kind=sgp", "optim.lr=1e200"), WORKERS)
    assert "not finite" in outcome.diverged
    assert len(outcome.losses) < STEPS


SHARING = ["optim.kind=lars", "optim.norm_group=2"]


@pytest.mark.parametrize(
    ("more", "workers", "says"),
    [
        (["strategy.kind=crossover", "strategy.topology=hypercube"], 6, "4"),
        ([], 17, "at most 16 workers"),
        (["train.precision=fp16"], 4, "bf16"),
        (["strategy.kind=crossover", "strategy.mix=gradients"], 4, 'workers mix "parameters"'),
        (["strategy.kind=sgp", *SHARING], 4, "norm_group = 2: .* leave norm_group out"),
        (["strategy.kind=local_sgd", *SHARING], 4, "norm_group = 2: .* leave norm_group out"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(tmp_path, more, workers, says):
    with pytest.raises(ConfigError, match=says):
        virtual(loaded_run(tmp_path, *more), workers)


def test_one_model_of_all_has_the_norms_of_every_group(tmp_path):
    assert not virtual(loaded_run(tmp_path, *SHARING), WORKERS).diverged

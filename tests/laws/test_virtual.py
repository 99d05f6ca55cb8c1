"""Virtual workers give the same evaluations as real ranks, for every strategy."""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.data import open_sample_source
from stretto.errors import ConfigError
from stretto.run import PreparedRun, RunConfig, assemble
from stretto.strategies import STRATEGIES
from stretto.strategies.adpsgd import ADPSGD
from stretto.telemetry.events import EvalDone
from stretto.topology import random_operation_order
from stretto.train.loop import train
from stretto.train.step_consensus import LAG
from stretto.virtual import train_virtually
from stretto.virtual.stacked_gossip import StackedConsensus
from stretto.virtual.worker_gradients import RECORDERS, run_sequentially
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
        ["strategy.mix=gradients"],
        ["strategy.mix=gradients", "strategy.topology=complete", "train.clip_norm=0.5"],
        ["strategy.mix=gradients", "strategy.groups=2", "strategy.every=2", "strategy.wire=bf16"],
        ["strategy.mix=gradients", "strategy.exact_every=3", "strategy.segments=fine"],
        ["strategy.wire=fp8", "strategy.delay=1", "strategy.groups=2"],
        ["strategy.consensus_every=1", "strategy.consensus_limit=0.01"],
        ["strategy.consensus_every=2", "strategy.consensus_limit=0.005", "strategy.delay=1"],
        [
            "strategy.consensus_every=1",
            "strategy.consensus_limit=0.002",
            "strategy.consensus_sample=0.2",
            "strategy.exact_every=4",
            "strategy.groups=2",
            "strategy.every=3",  # two groups are equal right after they average
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
    """A float64 model with batch statistics and a layer that is called twice."""

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
    steps = [f"train.steps={STEPS}", f"train.eval_every={EVAL_EVERY}", "train.save_every=1000"]
    rate = ["optim.lr=0.05", "optim.weight_decay=0.01", "optim.decay=cosine"]
    return load(RunConfig, None, [*data, *steps, *rate, f"run.folder={folder}", *more])


def initial():
    torch.manual_seed(0)
    return Wide()


def sources(loaded):
    return [open_sample_source(loaded.config.data, train=part) for part in (True, False)]


def real(loaded, workers):
    """Train real ranks as threads; return the evaluations of rank 0."""
    model, opened = initial(), sources(loaded)
    models = [copy.deepcopy(model) for _ in range(workers)]
    events = []

    def on_rank(transport):
        report = events.append if transport.rank == 0 else lambda event: None
        prepared = PreparedRun(*opened, models[transport.rank])
        world = World(transport.rank, Mesh((workers,)))
        parts = assemble(loaded, prepared, world, transport, report)
        train(replace(parts, checkpoints=None))
        parts.strategy.close()

    run_threads(workers, on_rank)
    return [event for event in events if isinstance(event, EvalDone)]


def virtual(loaded, workers):
    return train_virtually(loaded.config, PreparedRun(*sources(loaded), initial()), workers)


def assert_same(loaded, workers=WORKERS):
    expected, found = real(loaded, workers), virtual(loaded, workers).evaluations
    assert len(expected) == len(found) == 2
    for of_ranks, of_virtual in zip(expected, found, strict=True):
        assert (of_virtual.step, of_virtual.accuracy) == (of_ranks.step, of_ranks.accuracy)
        for name in ("loss", "local_loss", "consensus_distance"):
            one, other = getattr(of_virtual, name), getattr(of_ranks, name)
            assert one == (None if other is None else pytest.approx(other, rel=0, abs=1e-9)), name


@pytest.mark.parametrize(("kind", "more"), CASES, ids=[" ".join([k, *m]) for k, m in CASES])
def test_virtual_workers_give_the_evaluations_of_real_ranks(tmp_path, kind, more):
    assert_same(loaded_run(tmp_path, f"strategy.kind={kind}", "optim.momentum=0.9", *more))


LIMITED = [(kind, more) for kind, more in CASES if any("consensus_limit" in one for one in more)]


@pytest.mark.parametrize(("kind", "more"), LIMITED, ids=[" ".join([k, *m]) for k, m in LIMITED])
def test_the_consensus_limits_compared_above_are_exceeded(tmp_path, monkeypatch, kind, more):
    """Otherwise the comparison above would not cover the exact averages that follow."""
    due, end = [], StackedConsensus.end

    def note(self, step, *, has_averaged):
        end(self, step, has_averaged=has_averaged)
        due.append(self.is_exact_average_due)

    monkeypatch.setattr(StackedConsensus, "end", note)
    virtual(loaded_run(tmp_path, f"strategy.kind={kind}", "optim.momentum=0.9", *more), WORKERS)
    assert any(due)


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
def test_adpsgd_gives_the_evaluations_of_real_ranks_in_the_same_order(
    tmp_path, monkeypatch, workers, more
):
    epoch_steps = SAMPLES // BATCH + 1
    syncs = sorted({0, *range(EVAL_EVERY, STEPS + 1, EVAL_EVERY), *range(0, STEPS, epoch_steps)})
    order = InOrder(
        operation
        for first, end in pairwise(syncs)
        for operation in random_operation_order(
            workers, end - first, SEED, first=first, max_lead=LAG
        )
    )
    create = ADPSGD.__init__

    def create_in_order(strategy, config, transport, *args, **more):
        create(strategy, config, transport, *args, **more)
        strategy.operation_gate = order.turn_of(transport.rank)

    monkeypatch.setattr(ADPSGD, "__init__", create_in_order)
    adpsgd = ["strategy.kind=adpsgd", f"strategy.seed={SEED}"]
    assert_same(loaded_run(tmp_path, *adpsgd, *more), workers)


def test_the_seed_determines_the_order_of_adpsgd(tmp_path):
    one, same, other = (
        virtual(loaded_run(tmp_path, "strategy.kind=adpsgd", f"strategy.seed={seed}"), WORKERS)
        for seed in (1, 1, 2)
    )
    assert one.losses == same.losses != other.losses
    assert len(one.losses) == len(one.consensus_distances) == STEPS


def test_every_strategy_is_compared_with_real_ranks():
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
def test_evaluations_match_with_every_optimizer_and_train_setting(tmp_path, kind, more):
    assert_same(loaded_run(tmp_path, f"strategy.kind={kind}", *more))


def test_evaluations_match_for_one_worker_and_for_unequal_shares(tmp_path):
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
def test_replaying_a_captured_step_gives_the_same_losses(tmp_path, monkeypatch, more):
    """The last step of an epoch has fewer samples, so it is not replayed."""
    loaded, replays = loaded_run(tmp_path, *more), []
    expected = virtual(loaded, WORKERS)

    def record(lanes):
        replay = run_sequentially(lanes)
        replay()  # recording runs the step once, which must leave no trace
        return lambda: (replays.append(1), replay())

    monkeypatch.setitem(RECORDERS, "cpu", record)
    found = virtual(loaded, WORKERS)
    assert len(replays) == STEPS - STEPS // 3
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    for one, other in zip(found.evaluations, expected.evaluations, strict=True):
        assert (one.loss, one.consensus_distance or 0) == pytest.approx(
            (other.loss, other.consensus_distance or 0), rel=1e-9
        )


def test_the_consensus_distance_is_measured_throughout_a_run(tmp_path):
    outcome = virtual(loaded_run(tmp_path, "strategy.kind=crossover"), WORKERS)
    assert [step for step, _ in outcome.consensus_distances] == list(range(1, STEPS + 1))
    assert outcome.consensus_distances[-1] == (STEPS, outcome.evaluations[-1].consensus_distance)
    assert virtual(loaded_run(tmp_path), WORKERS).consensus_distances == ()
    long = virtual(loaded_run(tmp_path, "strategy.kind=sgp", "train.steps=120"), WORKERS)
    assert [step for step, _ in long.consensus_distances] == list(range(3, 121, 3))


def test_a_loss_that_is_not_finite_ends_the_run_without_an_error(tmp_path):
    outcome = virtual(loaded_run(tmp_path, "strategy.kind=sgp", "optim.lr=1e200"), WORKERS)
    assert "not finite" in outcome.stop_reason
    assert len(outcome.losses) < STEPS


SHARING = ["optim.kind=lars", "optim.norm_group=2"]


@pytest.mark.parametrize(
    ("more", "workers", "says"),
    [
        (["strategy.kind=crossover", "strategy.topology=hypercube"], 6, "4"),
        ([], 17, "at most 16 workers"),
        (["train.precision=fp16"], 4, "bf16"),
        (["strategy.wire=fp8"], 4, 'wire = "fp8": virtual workers sum'),
        (["strategy.wire=fp32"], 4, 'wire = "fp32": virtual workers sum'),
        (["strategy.wire=topk 1%"], 4, 'wire = "topk 1%": virtual workers sum'),
        (["strategy.kind=local_sgd", "strategy.wire=bf16"], 4, 'wire = "bf16": virtual workers'),
        (["strategy.kind=sharded", "strategy.wire=bf16"], 4, 'wire = "bf16": virtual workers'),
        (["strategy.kind=sharded", "strategy.parameters=bf16"], 4, 'parameters = "bf16": virtual'),
        (["strategy.kind=crossover", "strategy.groups=hosts"], 4, "virtual workers have no hosts"),
        (["strategy.kind=sgp", *SHARING], 4, "norm_group = 2: .* leave norm_group out"),
        (["strategy.kind=local_sgd", *SHARING], 4, "norm_group = 2: .* leave norm_group out"),
    ],
)
def test_unsupported_settings_are_refused_with_an_alternative(tmp_path, more, workers, says):
    with pytest.raises(ConfigError, match=says):
        virtual(loaded_run(tmp_path, *more), workers)


def test_norm_group_is_allowed_where_all_workers_share_one_replica(tmp_path):
    assert not virtual(loaded_run(tmp_path, *SHARING), WORKERS).stop_reason

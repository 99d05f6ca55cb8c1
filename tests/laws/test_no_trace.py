"""Saving, evaluating, or stopping and resuming a run does not change a bit of its result.

The model makes this hard: it has statistics of several types that each rank counts by itself during
training.
"""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.data import open_sample_source
from stretto.run import PreparedRun, RunConfig, assemble
from stretto.train.loop import train
from stretto.train.state import resume_state

STEPS = 5
NEVER = 1000


class NormWithOwnStatistics(nn.Module):
    """Subtracts a running mean in training too, so that a rank's outputs depend on its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, 1, 1))
        self.register_buffer("rough", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.tensor(False))

    def forward(self, x):
        out = x - self.mean + 0.01 * self.odd
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x[:, :, :1, :1].mean(0), 0.5)
                self.rough.copy_(self.mean.flatten())
                self.seen.add_(len(x))
                self.odd.copy_(self.seen % 2 == 1)
        return out


def with_statistics():
    return nn.Sequential(
        nn.Conv2d(3, 4, 4, stride=4),
        nn.BatchNorm2d(4),
        NormWithOwnStatistics(),
        nn.Flatten(),
        nn.Linear(16, 8),
    )


def loaded_run(folder, *more):
    data = ["data.samples=20", "data.test_samples=5", "data.size=8"]
    settings_of_run = ["optim.lr=0.05", "train.log_every=1000", f"run.folder={folder}"]
    return load(RunConfig, None, [*data, *settings_of_run, *more])


def run(size, loaded, *, saves=True, resume=False):
    """Train as ``size`` ranks; return, for each, the bytes of everything that training changes."""
    torch.manual_seed(0)
    initial = with_statistics()
    models = [copy.deepcopy(initial) for _ in range(size)]
    sources = [open_sample_source(loaded.config.data, train=part) for part in (True, False)]

    def on_rank(transport):
        world = World(transport.rank, Mesh((size,)))
        prepared = PreparedRun(*sources, models[transport.rank])
        parts = assemble(loaded, prepared, world, transport, lambda event: None)
        if not saves:
            parts = replace(parts, checkpoints=None)
        first = resume_state(parts, log=pytest.fail) if resume else 0
        train(parts, first)
        parts.strategy.close()
        return everything(parts)

    return run_threads(size, on_rank)


def everything(parts):
    tensors = dict(parts.model.state_dict())
    for index, state in parts.optimizer.state_dict()["state"].items():
        tensors |= {f"{index}/{name}": value for name, value in state.items() if value is not None}
    return {name: (t.dtype, t.view(-1).view(torch.uint8).tolist()) for name, t in tensors.items()}


RUNS = {"size": st.integers(1, 4), "batch": st.integers(1, 20)}
"""Small batches leave ranks without samples, so that their counts differ."""


@settings(max_examples=15, deadline=None)
@given(**RUNS, cut=st.integers(1, STEPS - 1))
def test_a_run_stopped_anywhere_and_resumed_equals_one_that_never_stopped(
    tmp_path_factory, size, batch, cut
):
    folder = tmp_path_factory.mktemp("cut")
    settings_of_run = [
        f"train.batch={batch}",
        f"train.eval_every={NEVER}",
        f"train.save_every={NEVER}",
    ]
    whole = loaded_run(folder, *settings_of_run, f"train.steps={STEPS}")
    undisturbed = run(size, whole, saves=False)
    run(size, loaded_run(folder, *settings_of_run, f"train.steps={cut}"))
    assert run(size, whole, resume=True) == undisturbed


@settings(max_examples=10, deadline=None)
@given(**RUNS)
@pytest.mark.parametrize("often", ["save", "eval"])
def test_a_run_saved_or_evaluated_after_every_step_equals_one_that_never_was(
    tmp_path_factory, size, batch, often
):
    rare = "eval" if often == "save" else "save"
    settings_of_run = [
        f"train.batch={batch}",
        f"train.steps={STEPS}",
        f"train.{rare}_every={NEVER}",
    ]
    folder = tmp_path_factory.mktemp("often")
    observed = run(size, loaded_run(folder, *settings_of_run, f"train.{often}_every=1"))
    undisturbed = run(
        size, loaded_run(folder, *settings_of_run, f"train.{often}_every={NEVER}"), saves=False
    )
    assert observed == undisturbed


DIFFERING_REPLICAS = [
    (3, "crossover"),
    (3, "crossover", "strategy.delay=1"),
    (3, "sgp", "strategy.delay=2"),
    (3, "dpsgd", "strategy.every=2"),
    (4, "crossover", "strategy.groups=2"),
    (4, "crossover", "strategy.groups=2", "strategy.delay=1", "train.clip_norm=0.5"),
    (4, "sgp", "strategy.groups=2", "strategy.delay=2"),
    (3, "crossover", "strategy.delay=1", "strategy.wire=fp8", "strategy.exact_every=2"),
    (
        3,
        "crossover",
        "strategy.wire=fp8",
        "strategy.consensus_every=3",
        "strategy.consensus_limit=1e-5",
    ),
    (3, "sgp", "strategy.delay=2", "strategy.exact_every=4", "strategy.consensus_every=1"),
    # fp8 shards of different lengths.
    (6, "crossover", "strategy.groups=2", "strategy.delay=1", "strategy.wire=fp8"),
    (
        4,
        "crossover",
        "strategy.groups=2",
        "strategy.wire=fp8",
        "strategy.consensus_every=3",
        "strategy.consensus_limit=1e-5",
    ),
    (4, "sgp", "strategy.groups=2", "strategy.delay=1", "strategy.exact_every=4"),
    (3, "crossover", "strategy.mix=gradients"),
    (4, "crossover", "strategy.mix=gradients", "strategy.groups=2", "strategy.exact_every=4"),
    (3, "sgp", "optim.kind=lars", "optim.norm_group=3", "optim.norm_group_from_epoch=1"),
    (3, "crossover", "strategy.segments=fine", "optim.kind=lars", "optim.norm_group=3"),
]
"""Number of ranks, and a strategy under which some of their replicas differ."""


@pytest.mark.parametrize("strategy", DIFFERING_REPLICAS, ids=lambda case: " ".join(map(str, case)))
@pytest.mark.parametrize("cut", [1, 3])
def test_the_same_holds_if_replicas_differ(tmp_path, strategy, cut):
    size, kind, *settings = strategy
    never = [f"train.eval_every={NEVER}", f"train.save_every={NEVER}"]
    # In a pass of 20 samples the last step has 2: some ranks have none.
    settings_of_run = ["train.batch=9", f"strategy.kind={kind}", *settings, "optim.momentum=0.9"]
    whole = loaded_run(tmp_path, *settings_of_run, *never, f"train.steps={STEPS}")
    undisturbed = run(size, whole, saves=False)
    assert undisturbed[0]["0.weight"] != undisturbed[-1]["0.weight"]
    run(size, loaded_run(tmp_path, *settings_of_run, *never, f"train.steps={cut}"))
    assert run(size, whole, resume=True) == undisturbed
    often = ["train.eval_every=1", "train.save_every=1", f"train.steps={STEPS}", "run.name=often"]
    assert run(size, loaded_run(tmp_path, *settings_of_run, *often)) == undisturbed


def test_the_statistics_of_the_ranks_of_these_runs_do_differ(tmp_path):
    settings_of_run = ["train.batch=9", f"train.steps={STEPS}", f"train.eval_every={NEVER}"]
    first, *_, last = run(4, loaded_run(tmp_path, *settings_of_run))
    assert {name for name in first if first[name] != last[name]} == {
        *("1.running_mean", "1.running_var", "1.num_batches_tracked"),
        *("2.mean", "2.rough", "2.seen", "2.odd"),
    }

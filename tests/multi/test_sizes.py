"""A run of four ranks, stopped and resumed by four, three and two: the same batches and losses."""

import json
import shutil
import subprocess
import sys

import pytest

from stretto.config import load
from stretto.data import open_source, step_share, steps_per_epoch
from stretto.run import RunConfig
from stretto.telemetry.events import RunStarted, StepDone, from_record

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

STOPPED_AT, STEPS = 5, 10
RUN = f"""
[run]
threads = 1
[data]
kind = "text"
path = "text"
context = 16
[model]
kind = "gpt"
context = 16
blocks = 1
width = 16
heads = 2
[optim]
lr = 0.05
[train]
batch = 13
steps = {STEPS}
log_every = 1
"""
TEXT = bytes((i * i + i // 7) % 96 + 32 for i in range(2000))
"""106 windows to train on: the ninth step has two samples, fewer than ranks."""


def stretto_train(folder, name, workers, *more):
    command = [sys.executable, "-m", "stretto", "train", "run.toml", f"run.name={name}"]
    done = subprocess.run(
        [*command, "--workers", str(workers), *more],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def events_of(folder, name):
    lines = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
    return [from_record(json.loads(line)) for line in lines]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return a folder that holds a run of four ranks, ended before its last step."""
    folder = tmp_path_factory.mktemp("sizes")
    (folder / "run.toml").write_text(RUN)
    (folder / "text").write_bytes(TEXT)
    stretto_train(folder, "stopped", 4, f"train.steps={STOPPED_AT}")
    return folder


def losses_of_resumed(folder, workers):
    """Return the losses after the stop, by step, of a copy of the run resumed by ``workers``."""
    name = f"resumed-by-{workers}"
    shutil.copytree(folder / "runs" / "stopped", folder / "runs" / name)
    stretto_train(folder, name, workers, "--resume")
    events = events_of(folder, name)
    assert [event.workers for event in events if isinstance(event, RunStarted)] == [4, workers]
    return {e.step: e.loss for e in events if isinstance(e, StepDone) and e.step > STOPPED_AT}


@pytest.fixture(scope="module")
def resumed_by_as_many(stopped):
    losses = losses_of_resumed(stopped, 4)
    assert list(losses) == list(range(STOPPED_AT + 1, STEPS + 1))
    return losses


@pytest.mark.parametrize("workers", [3, 2])
def test_a_run_resumed_by_fewer_ranks_has_the_losses_of_one_resumed_by_as_many(
    workers, stopped, resumed_by_as_many
):
    losses = losses_of_resumed(stopped, workers)
    assert losses == pytest.approx(resumed_by_as_many, rel=1e-6, abs=0)


@pytest.mark.parametrize("workers", [4, 3, 2])
def test_the_next_global_batches_are_the_same_at_every_size(workers, stopped, monkeypatch):
    monkeypatch.chdir(stopped)
    config = load(RunConfig, stopped / "run.toml").config
    num_samples = open_source(config.data, train=True).num_samples
    pass_steps = steps_per_epoch(num_samples, config.train.batch)

    def global_batch(step, size):
        epoch, at = divmod(step, pass_steps)
        order = {"num_samples": num_samples, "seed": config.run.seed, "epoch": epoch}
        batch = config.train.batch
        ranks = [step_share(at, batch=batch, rank=r, size=size, **order) for r in range(size)]
        return sorted(sample for share in ranks for sample in share.samples.tolist())

    assert pass_steps == 9
    for step in range(STOPPED_AT, STEPS):
        assert global_batch(step, workers) == global_batch(step, 1)

"""A run of four ranks, resumed with four, three and two: the same batches and losses."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from stretto.config import load
from stretto.data import open_sample_source, samples_at
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
kind = "custom"
target = "watched:build"
[optim]
lr = 0.05
[train]
batch = 13
steps = {STEPS}
log_every = 1
"""
WATCHED = """
import hashlib, json, os
from stretto.models.gpt import GPT, GPTConfig

def build():
    model = GPT(GPTConfig(context=16, blocks=1, width=16, heads=2))
    model.register_forward_pre_hook(record_batch)
    return model

def record_batch(model, inputs):
    if not model.training:
        return
    # The weights identify the step: equal on all ranks, and changed by each update.
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    record = {"weights": weights.hexdigest(), "samples": inputs[0].tolist()}
    with open(os.path.join(os.environ["SEEN"], os.environ["RANK"]), "a") as file:
        print(json.dumps(record), file=file)
"""
"""A user's model that writes to a file what each rank trains on."""
TEXT = bytes((i * i + i // 7) % 96 + 32 for i in range(2000))
"""106 windows to train on; the ninth step has two samples, fewer than ranks."""


def stretto_train(folder, name, workers, *more):
    command = [sys.executable, "-m", "stretto", "train", "run.toml", f"run.name={name}"]
    seen = folder / "seen" / name
    seen.mkdir(parents=True)
    done = subprocess.run(
        [*command, "--workers", str(workers), *more],
        cwd=folder,
        env={**os.environ, "SEEN": str(seen)},
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
    """Return a folder with a run of four ranks that ended before its last step."""
    folder = tmp_path_factory.mktemp("sizes")
    (folder / "run.toml").write_text(RUN)
    (folder / "text").write_bytes(TEXT)
    (folder / "watched.py").write_text(WATCHED)
    stretto_train(folder, "stopped", 4, f"train.steps={STOPPED_AT}")
    return folder


@pytest.fixture(scope="module")
def resumed(stopped):
    """Return a function that resumes a copy of the run with so many ranks, and returns its name."""

    @cache
    def resume(workers):
        name = f"resumed-by-{workers}"
        shutil.copytree(stopped / "runs" / "stopped", stopped / "runs" / name)
        stretto_train(stopped, name, workers, "--resume")
        return name

    return resume


def losses_after_the_stop(folder, name):
    events = events_of(folder, name)
    return {e.step: e.loss for e in events if isinstance(e, StepDone) and e.step > STOPPED_AT}


def batches_trained_on(folder, name):
    """Return the samples of each step, over all ranks and sorted, as the model saw them."""
    ranks = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "seen" / name).iterdir())
    ]
    steps = {record["weights"]: [] for record in ranks[0]}  # rank 0 has samples in every step
    for record in (record for rank in ranks for record in rank):
        steps[record["weights"]] += record["samples"]
    return [sorted(samples) for samples in steps.values()]


def batches_of_an_undisturbed_run(folder):
    """Return the samples of each step after the stop, computed from the order and the text
    alone.
    """
    loaded = load(RunConfig, folder / "run.toml", [f"data.path={folder / 'text'}"]).config
    source = open_sample_source(loaded.data, train=True)
    pass_steps = -(-source.num_samples // loaded.train.batch)
    assert pass_steps == 9
    batches = []
    for step in range(STOPPED_AT, STEPS):
        epoch, at = divmod(step, pass_steps)
        start = at * loaded.train.batch
        epoch_indices = np.arange(start, min(start + loaded.train.batch, source.num_samples))
        order = {"num_samples": source.num_samples, "seed": loaded.run.seed, "epoch": epoch}
        batches.append(sorted(source.batch(samples_at(epoch_indices, **order))[0].tolist()))
    return batches


@pytest.mark.parametrize("workers", [3, 2])
def test_a_run_resumed_with_fewer_ranks_has_the_losses_of_one_resumed_with_as_many(
    workers, stopped, resumed
):
    as_many, fewer = (losses_after_the_stop(stopped, resumed(size)) for size in (4, workers))
    assert list(as_many) == list(range(STOPPED_AT + 1, STEPS + 1))
    assert fewer == pytest.approx(as_many, rel=1e-6, abs=0)


@pytest.mark.parametrize("workers", [4, 3, 2])
def test_a_run_resumed_with_any_number_of_ranks_trains_on_the_next_batches(
    workers, stopped, resumed
):
    seen = batches_trained_on(stopped, resumed(workers))
    assert seen == batches_of_an_undisturbed_run(stopped)


@pytest.mark.parametrize("workers", [4, 3, 2])
def test_the_events_of_a_resumed_run_have_the_ranks_of_both_starts(workers, stopped, resumed):
    events = events_of(stopped, resumed(workers))
    assert [e.workers for e in events if isinstance(e, RunStarted)] == [4, workers]

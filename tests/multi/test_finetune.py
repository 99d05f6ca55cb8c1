"""Fine-tuning with real processes: another head and rate, and a resume without the source."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from stretto.checkpoint import find_and_load
from stretto.telemetry.events import RunStarted, from_record
from stretto.train.finetune import export_backbone

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

RUN = """
[run]
threads = 1
[data]
samples = 60
test_samples = 16
size = 8
[model]
width = 4
[optim]
lr = 0.02
[train]
batch = 20
steps = 2
"""
TUNED = ["run.name=tuned", "model.classes=3", "data.classes=3", "optim.lr=1e-9", "run.seed=5"]
HEAD = 'init.newly_initialised=["head.*"]'


def stretto_train(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "stretto", "train", "run.toml", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def weights_of(folder, name):
    _, state = find_and_load(folder / "runs" / name, log=pytest.fail)
    return state.step, state.tensors_under("model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a run of one rank, and a run of two ranks initialised from it."""
    base = tmp_path_factory.mktemp("tuning")
    (base / "run.toml").write_text(RUN)
    done = stretto_train(base, "run.name=first")
    assert done.returncode == 0, done.stderr
    done = stretto_train(base, *TUNED, "init.checkpoint=runs/first", HEAD, "--workers", "2")
    assert done.returncode == 0, done.stderr
    return base


def test_the_body_is_that_of_the_earlier_run_and_the_head_is_new(folder):
    (_, first), (step, tuned) = weights_of(folder, "first"), weights_of(folder, "tuned")
    assert step == 2
    for name in first:
        if name.startswith("head."):
            assert tuned[name].shape[0] == 3
        else:  # the rate is so small that training hardly changed it
            torch.testing.assert_close(tuned[name], first[name], rtol=1e-5, atol=1e-6)


def test_the_first_event_says_where_the_weights_are_from(folder):
    lines = (folder / "runs" / "tuned" / "events.jsonl").read_text().splitlines()
    started = from_record(json.loads(lines[0]))
    assert isinstance(started, RunStarted)
    assert started.note == (
        "weights from runs/first/checkpoints/step-00000002, 2 tensors newly initialised"
    )


def test_a_resumed_run_needs_no_source_of_initial_weights(folder, tmp_path):
    shutil.copytree(folder / "runs" / "tuned", tmp_path / "runs" / "tuned")
    shutil.copy(folder / "run.toml", tmp_path)
    more = ["init.checkpoint=runs/first", HEAD, "train.steps=3", "--workers", "2", "--resume"]
    done = stretto_train(tmp_path, *TUNED, *more)
    assert done.returncode == 0, done.stderr
    (_, before), (step, after) = weights_of(folder, "tuned"), weights_of(tmp_path, "tuned")
    assert step == 3
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-6)


def test_a_head_that_does_not_fit_is_refused_before_any_rank_starts(folder):
    more = ["run.name=refused", "model.classes=3", "data.classes=3", "init.checkpoint=runs/first"]
    done = stretto_train(folder, *more, "--workers", "2")
    assert done.returncode == 2
    assert "head.weight is [3, 16] in the model, [8, 16] in the checkpoint" in done.stderr
    assert HEAD in done.stderr
    assert not (folder / "runs" / "refused").exists()


def test_a_backbone_of_8_classes_starts_a_run_of_5(folder):
    """The rate is too small to change a weight, so the final weights are the initial ones."""
    out = folder / "body.safetensors"
    exported = export_backbone(folder / "runs" / "first", out, log=pytest.fail)
    assert (exported.step, exported.head) == (2, ("head",))
    settings = ["run.name=five", "model.classes=5", "data.classes=5", "optim.lr=1e-30"]
    more = ["run.seed=5", "train.steps=1", "init.checkpoint=body.safetensors"]
    done = stretto_train(folder, *settings, *more, "--workers", "2")
    assert done.returncode == 0, done.stderr
    (_, first), (_, five) = weights_of(folder, "first"), weights_of(folder, "five")
    for name in first:
        if name.startswith("head."):
            assert five[name].shape[0] == 5
        else:
            assert torch.equal(five[name], first[name]), name

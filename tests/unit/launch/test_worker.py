"""The main function of a rank, alone in its world: train, resume, stop, refuse."""

import io
import json
import os
import signal

import pytest
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.config import load
from stretto.errors import ConfigError
from stretto.launch.worker import run_worker
from stretto.models import CNNConfig, build_model
from stretto.run import RunConfig

SETTINGS = ["data.samples=24", "data.test_samples=4", "data.size=8", "model.width=2"]
SETTINGS += ["train.batch=12", "train.log_every=1", "run.threads=1"]
STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2]


@pytest.fixture(autouse=True)
def _handlers_are_put_back():
    """A run that is stopped ignores signals to the end of its process, which is this one."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def work(folder, *settings, resume=False, **world):
    """Run a worker; return how its run ended, and the lines that it wrote."""
    loaded = load(RunConfig, None, [*SETTINGS, f"run.folder={folder}", *settings])
    stream = io.StringIO()
    ended = run_worker(loaded, World(0, Mesh((1,)), **world), resume=resume, stream=stream)
    return ended, stream.getvalue()


def events(folder, kind=""):
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if kind in ("", event["event"])]


def test_a_run_leaves_its_settings_its_events_and_a_checkpoint(tmp_path):
    ended, _ = work(tmp_path, "train.steps=3")
    assert (ended.step, ended.stopped, ended.again) == (3, "", False)
    kinds = [event["event"] for event in events(tmp_path)]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_ended")
    assert [event["step"] for event in events(tmp_path, "step_done")] == [1, 2, 3]
    assert load(RunConfig, tmp_path / "run" / "resolved.toml").config.train.steps == 3
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


def test_a_trace_is_written_unless_none_is_wanted(tmp_path):
    work(tmp_path / "without", "train.steps=2", "run.trace=false")
    assert not (tmp_path / "without" / "run" / "trace").exists()
    work(tmp_path, "train.steps=2")
    trace = json.loads((tmp_path / "run" / "trace" / "rank-0.json").read_text())
    assert {event.get("name") for event in trace["traceEvents"]} >= {"forward", "backward"}


def test_a_resumed_run_goes_on_where_it_was(tmp_path):
    work(tmp_path, "train.steps=2")
    ended, _ = work(tmp_path, "train.steps=4", resume=True)
    assert ended.step == 4
    assert [event["step"] for event in events(tmp_path, "step_done")] == [1, 2, 3, 4]
    assert [event["note"] for event in events(tmp_path, "run_started")] == ["", "resumed at step 2"]


def test_a_job_that_its_launcher_restarted_resumes_by_itself(tmp_path):
    work(tmp_path, "train.steps=2")
    ended, _ = work(tmp_path, "train.steps=3", generation=1)
    assert ended.step == 3
    assert [event["step"] for event in events(tmp_path, "step_done")] == [1, 2, 3]


def test_a_run_that_has_ended_trains_no_more(tmp_path):
    work(tmp_path, "train.steps=2")
    before = events(tmp_path)
    ended, said = work(tmp_path, "train.steps=2", resume=True)
    assert ended is None
    assert "run is at step 2 of 2 already: raise train.steps or train.epochs" in said
    assert events(tmp_path) == before


def test_without_a_checkpoint_a_resumed_run_begins_at_the_beginning(tmp_path):
    ended, said = work(tmp_path, "train.steps=2", resume=True)
    assert ended.step == 2
    assert f"no valid checkpoint in {tmp_path}/run/checkpoints: starting at the beginning" in said


def test_an_existing_run_is_not_overwritten(tmp_path):
    work(tmp_path, "train.steps=2")
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="resume"):
        work(tmp_path, "train.steps=2")
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


class Stopping(nn.Module):
    """A model in whose third forward the process gets a stop signal."""

    def __init__(self):
        super().__init__()
        self.model = build_model(CNNConfig(width=2), 0)
        self.forwards = 0

    def forward(self, inputs):
        self.forwards += self.training
        if self.training and self.forwards == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return self.model(inputs)


@pytest.mark.parametrize(
    ("world", "hint"),
    [
        ({}, r"saved; go on with --resume (exit code "),
        (
            {"restart_command": ("scontrol", "requeue", "7")},
            "saved; `scontrol requeue 7` starts this job again, and it resumes by itself",
        ),
        ({"launcher": "stretto train --workers"}, ""),
    ],
    ids=["by hand", "by a scheduler", "by our launcher"],
)
def test_a_stop_request_ends_the_run_after_its_step_with_a_checkpoint(world, hint, tmp_path):
    custom = ["model.kind=custom", f"model.target={__name__}:Stopping"]
    settings = [one for one in SETTINGS if not one.startswith("model.")]
    loaded = load(RunConfig, None, [*settings, *custom, "train.steps=8", f"run.folder={tmp_path}"])
    stream = io.StringIO()
    ended = run_worker(loaded, World(0, Mesh((1,)), **world), stream=stream)
    assert (ended.step, ended.again) == (4, True)  # ranks ask each other as a step begins
    assert "USR1" in ended.stopped
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()
    said = [line for line in stream.getvalue().splitlines() if line.startswith("saved; ")]
    assert [line[: len(hint)] for line in said] == ([hint] if hint else [])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN

"""Twenty-odd run files that cannot be: one clear message each, exit code 2, no traceback."""

import fcntl

import pytest

from stretto.cli.main import main
from stretto.launch.worker_group import LaunchOutcome

TEXT = "to be or not to be " * 400

BAD = {
    "not toml": ("[train\nbatch = 8", "line 1"),
    "wrong type: text for a number": ('[train]\nbatch = "many"', 'train.batch = "many"'),
    "wrong type: number for text": ("[run]\nname = 7", "run.name = 7"),
    "wrong type: table for a number": ("[train.batch]\nx = 1", "train.batch"),
    "a fraction of a step": ("[train]\nsteps = 2.5", "whole number"),
    "negative": ("[train]\nbatch = -1", "train.batch = -1"),
    "zero steps": ("[train]\nsteps = 0", "train.steps = 0"),
    "typo in a key": ("[train]\nbacth = 8", "batch"),
    "typo in a table": ("[trian]\nbatch = 8", "train"),
    "unknown kind of model": ('[model]\nkind = "resnett"', "resnet"),
    "unknown kind of strategy": ('[strategy]\nkind = "allredcue"', "allreduce"),
    "unknown choice": ('[train]\nprecision = "bf17"', "bf16"),
    "key of another kind": ('[model]\nkind = "cnn"\nblocks = 2', "model.blocks"),
    "unknown algorithm": ('[strategy]\nalgorithm = "rign"', "ring"),
    "algorithm without a size": ('[strategy]\nalgorithm = "native, ring"', "from SIZE"),
    "size without sense": ('[strategy]\nbucket_bytes = "2 parsecs"', "2MB"),
    "lengths that do not add up": (
        "[strategy]\nbucket_lengths = [1, 2]",
        "strategy.bucket_lengths",
    ),
    "impossible batch": ("[train]\nbatch = 5000\n[data]\nsamples = 100", "5000"),
    "missing text": (
        '[model]\nkind = "gpt"\n[data]\nkind = "text"\npath = "nowhere.txt"',
        "nowhere.txt",
    ),
    "text too short": (
        '[model]\nkind = "gpt"\n[data]\nkind = "text"\npath = "short.txt"',
        "short.txt",
    ),
    "context that does not fit": (
        '[model]\nkind = "gpt"\ncontext = 8\n[data]\nkind = "text"\npath = "text.txt"',
        "model.context",
    ),
    "model that does not fit the data": ('[model]\nkind = "gpt"', "cannot learn"),
    "too few classes": ("[model]\nclasses = 3", "cannot learn"),
    "custom model that is not there": (
        '[model]\nkind = "custom"\ntarget = "no.such.module:net"',
        "model.target",
    ),
    "a name that is a path": ('[run]\nname = "../../etc"', "run.name"),
    "heads that do not divide": ('[model]\nkind = "gpt"\nwidth = 30\nheads = 4', "heads"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["alone", "launched"])
def test_a_bad_run_file_gets_one_clear_message(case, workers, here, capsys):
    text, expected = BAD[case]
    (here / "run.toml").write_text(text)
    assert main(["train", "run.toml", *workers]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.startswith("stretto: ")
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) <= 4, "one message, not a page"
    assert not (here / "runs").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.toml"], "nowhere.toml"),
        (["."], "directory"),
        (["run.toml", "train.batch"], "="),
        (["run.toml", "train.bacth=8"], "batch"),
        (["run.toml", "--workers", "0"], "--workers 0"),
        (["run.toml", "--workers", "5000"], "--workers 5000"),
    ],
)
def test_a_bad_command_gets_one_clear_message(arguments, expected, here, capsys):
    (here / "run.toml").write_text("")
    assert main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert "Traceback" not in captured.err


BROKEN = """
import torch
def broken():
    raise RuntimeError("boom")
class Two(torch.nn.Module):
    def forward(self, x):
        return x, x
"""


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("mine:broken", "boom"),
        ("mine:Two", "cannot learn"),
        ("builtins:dict", "dict"),
        (".x:y", ".x:y"),
    ],
)
def test_a_custom_model_that_fails_is_one_message(target, expected, here, capsys):
    (here / "mine.py").write_text(BROKEN)
    (here / "run.toml").write_text(f'[model]\nkind = "custom"\ntarget = "{target}"')
    assert main(["train", "run.toml"]) == 2
    assert expected in capsys.readouterr().err


def test_a_folder_that_is_a_file_is_one_message(here, capsys):
    (here / "run.toml").write_text("")
    assert main(["train", "run.toml", "run.folder=run.toml", "--workers", "2"]) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_run_that_goes_on_is_not_started_a_second_time(here, capsys):
    (here / "run.toml").write_text("[data]\nsamples=8\ntest_samples=1\n[train]\nbatch=8\nsteps=1")
    lock = here / "runs" / "run" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["train", "run.toml"]) == 2
        assert "in use by a run that goes on" in capsys.readouterr().err
        assert main(["train", "run.toml", "--resume"]) == 0
        assert "starting at the beginning" in capsys.readouterr().err


def test_resuming_a_finished_run_says_so_and_adds_nothing(here, capsys):
    (here / "run.toml").write_text("[data]\nsamples=8\ntest_samples=1\n[train]\nbatch=8\nsteps=1")
    assert main(["train", "run.toml"]) == 0
    events = (here / "runs/run/events.jsonl").read_text()
    assert main(["train", "run.toml", "--resume"]) == 0
    assert "at step 1 of 1 already" in capsys.readouterr().err
    assert (here / "runs/run/events.jsonl").read_text() == events


def test_a_demo_replaces_its_own_runs_and_nothing_else(here, monkeypatch):
    started = []

    def stop(arguments, *_more, **_named):
        started.append(arguments)
        return LaunchOutcome(1, reason="stopped here")

    monkeypatch.setattr("stretto.studies.demo.run_local_workers", stop)
    (here / "demo.toml").write_text("")
    (here / "thesis.txt").write_text("precious")
    (here / "1-worker").mkdir()
    (here / "1-worker" / "notes.txt").write_text("mine")
    assert main(["demo", "."]) == 1
    assert (here / "thesis.txt").read_text() == "precious"
    assert (here / "1-worker" / "notes.txt").exists()
    assert started


def test_a_demo_of_a_strategy_that_is_not_there_says_which_are(here, capsys):
    assert main(["demo", ".", "--strategies", "gossip"]) == 2
    assert "no strategy 'gossip'" in capsys.readouterr().err
    assert not (here / "demo.toml").exists()


def test_a_finished_run_is_not_overwritten(here, capsys):
    (here / "run.toml").write_text("[data]\nsamples=8\ntest_samples=1\n[train]\nbatch=8\nsteps=1")
    assert main(["train", "run.toml"]) == 0
    before = sorted(here.rglob("*"))
    assert main(["train", "run.toml"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before

"""Runs written before names changed go on: old settings, events and checkpoints are understood.

``tests/golden/old_runs`` holds two runs of the code before the change, stopped after step 3, and
the tensors with which that code ended them after step 6.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stretto.telemetry.events import EvalDone
from stretto.telemetry.sinks import read_events
from tests.multi.small_run import stretto

OLD_RUNS = Path(__file__).resolve().parents[1] / "golden" / "old_runs"


@pytest.mark.multi
@pytest.mark.parametrize("name", ["exact", "gossip"])
def test_an_old_run_is_resumed_and_ends_as_it_would_have(name, tmp_path):
    shutil.copytree(OLD_RUNS / name, tmp_path / "runs" / name)
    run_file = tmp_path / "runs" / name / "run.toml"
    run_file = run_file.rename(tmp_path / "old.toml")
    done = stretto(tmp_path, "train", str(run_file), "--workers", "2", "--resume")
    assert done.returncode == 0, done.stderr
    assert "run.silence_s is now called run.heartbeat_timeout_s" in done.stderr
    ended = tmp_path / "runs" / name / "checkpoints" / "step-00000006" / "tensors-00000.safetensors"
    found, expected = load_file(ended), load_file(OLD_RUNS / name / "end.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


def test_the_events_of_an_old_run_are_read_under_their_new_names():
    events = list(read_events(OLD_RUNS / "gossip" / "events.jsonl"))
    evaluations = [event for event in events if isinstance(event, EvalDone)]
    assert evaluations
    assert all(event.consensus_distance is not None for event in evaluations)
    assert all(event.local_loss is not None for event in evaluations)
    assert '"apart"' in (OLD_RUNS / "gossip" / "events.jsonl").read_text()

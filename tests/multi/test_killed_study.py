"""A scaling study that is killed leaves no process behind and continues where it stopped."""

import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.multi, pytest.mark.timeout(100)]

RUN = """
[train]
batch = 8
steps = 3
"""


def wait_until(condition, timeout_s):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not become true in time"
        time.sleep(0.05)


def test_a_killed_study_leaves_no_process_and_continues(tmp_path):
    (tmp_path / "small.toml").write_text(RUN)
    small = ["data.samples=32", "data.test_samples=8", "data.size=8", "model.width=2"]
    points = ["--workers", "2", "--strategies", "crossover", "--factors", "1,2,4", "--seeds", "40"]
    command = [sys.executable, "-m", "stretto", "study", "workers", "small.toml", *small, *points]
    results = tmp_path / "study" / "runs.jsonl"

    study = subprocess.Popen([*command, "--jobs", "2"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_until(lambda: results.exists() and results.read_text().count("\n") >= 2, 60)
    children = psutil.Process(study.pid).children(recursive=True)
    study.kill()
    study.wait()
    assert children
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive

    done = results.read_text().count("\n")
    assert done < 42, "it was killed too late to show anything"
    fewer = ["2" if word == "40" else word for word in command]
    again = subprocess.run(fewer, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "(1 runs done)" not in again.stderr, "the study started anew"

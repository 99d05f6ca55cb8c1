"""The same run as real processes: launched here, again from its resolved file, on slow links."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from stretto.checkpoint import load_one
from stretto.telemetry.timeline import read_chrome_trace

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

RUN = """
[run]
threads = 1
[data]
samples = 200
test_samples = 32
size = 16
[model]
width = 8
[optim]
lr = 0.02
[strategy]
fusion = "2KB"
algorithm = "native, ring from 1KB"
[train]
batch = 20
steps = 12
"""
STRETTO = [sys.executable, "-m", "stretto"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    (place / "run.toml").write_text(RUN)
    return place


def train(folder, name, *, start=STRETTO, more=()):
    """Train and return the last checkpoint's tensors."""
    arguments = ["train", "run.toml", f"run.name={name}", *more]
    done = subprocess.run(
        [*start, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return load_one(folder / "runs" / name / "checkpoints" / "step-00000012").tensors


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module")
def launched(folder):
    return train(folder, "launched", more=["--workers", "3"])


def test_the_resolved_run_file_gives_the_same_bits_again(folder, launched):
    shutil.copy(folder / "runs" / "launched" / "resolved.toml", folder / "again.toml")
    text = (folder / "again.toml").read_text()
    assert "threads = 1" in text
    assert "cuts = [" in text
    arguments = ["train", "again.toml", "run.name=again", "--workers", "3"]
    subprocess.run([*STRETTO, *arguments], cwd=folder, check=True, capture_output=True)
    again = load_one(folder / "runs" / "again" / "checkpoints" / "step-00000012").tensors
    assert same(again, launched)


def test_every_rank_leaves_its_time_line(folder, launched):
    for rank in range(3):
        (timeline,) = read_chrome_trace(folder / "runs/launched/trace" / f"rank-{rank}.json")
        names = {span.name for span in timeline.spans}
        assert {"forward", "backward", "update", "bucket 0", "wait for gradients"} <= names
        assert {span.step for span in timeline.spans if span.name == "bucket 0"} == set(range(12))


def test_workers_of_workers_are_refused(folder):
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    done = subprocess.run(
        [*STRETTO, "train", "run.toml", "--workers", "2"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "rank 0 of 1 already" in done.stderr


def test_ranks_with_other_settings_are_refused(folder):
    script = """
        [ "$RANK" = 1 ] && extra=train.batch=10
        exec "$0" -m stretto train run.toml run.name=differ $extra
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--no-python", "sh", "-c", script, sys.executable],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "rank 1 and rank 0 have different settings" in done.stderr


@pytest.mark.lab
def test_four_hosts_on_slow_links_train_one_model(folder):
    if os.geteuid() != 0 or not shutil.which("tc"):
        reason = "needs root and iproute2"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    lab = [*STRETTO, "lab", "--hosts", "3", "--rate", "100mbit", "--"]
    in_lab = train(folder, "lab", start=[*lab, "stretto"])
    alone = train(folder, "alone")
    for name, value in alone.items():
        torch.testing.assert_close(in_lab[name], value, rtol=1e-3, atol=1e-4)

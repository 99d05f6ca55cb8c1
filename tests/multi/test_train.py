"""The same run with real processes: launched here, again from its resolved file, on slow links."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from stretto.telemetry.timeline import read_chrome_trace
from tests.multi.needs import require
from tests.multi.small_run import STEPS, STRETTO, last_tensors, same, train, write_run

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def launched(folder):
    return train(folder, "launched", "--workers", "3")[1]


def test_the_resolved_run_file_gives_the_same_bits_again(folder, launched):
    shutil.copy(folder / "runs" / "launched" / "resolved.toml", folder / "again.toml")
    text = (folder / "again.toml").read_text()
    assert "threads = 1" in text
    assert "bucket_lengths = [" in text
    arguments = ["train", "again.toml", "run.name=again", "--workers", "3"]
    subprocess.run([*STRETTO, *arguments], cwd=folder, check=True, capture_output=True)
    assert same(last_tensors(folder, "again"), launched)


def test_every_rank_writes_its_timeline(folder, launched):
    for rank in range(3):
        (timeline,) = read_chrome_trace(folder / "runs/launched/trace" / f"rank-{rank}.json")
        names = {span.name for span in timeline.spans}
        assert {"forward", "backward", "update", "bucket 0", "wait for gradients"} <= names
        assert {span.step for span in timeline.spans if span.name == "bucket 0"} == set(
            range(STEPS)
        )


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
    require("ip", "tc", root=True)
    lab = [*STRETTO, "lab", "--hosts", "3", "--rate", "100mbit", "--"]
    _, in_lab = train(folder, "lab", start=[*lab, "stretto"])
    _, reference = train(folder, "alone")
    for name, value in reference.items():
        torch.testing.assert_close(in_lab[name], value, rtol=1e-3, atol=1e-4)

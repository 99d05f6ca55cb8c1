"""One run file under every launcher: the same weights, bit for bit."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from stretto.checkpoint import load_one

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

STEPS = 8
RUN = f"""
[run]
threads = 1
trace = false
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
cuts = [1, 1, 1, 1, 1, 1, 2]
algorithm = "native, ring from 1KB"
[train]
batch = 20
steps = {STEPS}
"""
STRETTO = [sys.executable, "-m", "stretto"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    (place / "run.toml").write_text(RUN)
    return place


def train(folder, name, start, *, more=(), environ=None):
    """Train under a launcher; return its output and the last checkpoint's tensors."""
    command = [*start, "train", "run.toml", f"run.name={name}", *more]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ or dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    last = folder / "runs" / name / "checkpoints" / f"step-{STEPS:08}"
    return done.stderr, load_one(last).tensors


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module")
def launched(folder):
    return train(folder, "launched", STRETTO, more=["--workers", "4"])[1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_gives_the_same_bits_with_either_rendezvous(folder, launched, rendezvous):
    where = {
        "static": [f"--master-port={free_port()}"],
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"],
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    start = [*torchrun, *where[rendezvous], "-m", "stretto"]
    told, tensors = train(folder, rendezvous, start)
    assert same(tensors, launched)
    assert "4 workers on 1 host" in told


def test_srun_on_two_nodes_gives_the_same_bits(folder, launched, slurm):
    start = ["srun", "-N2", "-n4", *STRETTO]
    told, tensors = train(folder, "srun", start, environ=slurm.environ)
    assert same(tensors, launched)
    assert "4 workers on 2 hosts" in told


def test_srun_with_uneven_nodes_knows_its_mesh(folder, slurm):
    start = ["srun", "-N2", "-n3", *STRETTO]
    told, _ = train(folder, "uneven", start, environ=slurm.environ)
    assert "3 workers on 2 hosts" in told


def test_mpirun_gives_the_same_bits(folder, launched, mpirun):
    told, tensors = train(folder, "mpirun", [*mpirun, "-n", "4", *STRETTO])
    assert same(tensors, launched)
    assert "4 workers on 1 host" in told

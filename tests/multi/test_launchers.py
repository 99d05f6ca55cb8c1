"""One run file under every launcher: the same weights, bit for bit."""

import socket
import sys

import pytest

from tests.multi.small_run import STRETTO, same, train, write_run

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

FIXED = ("run.trace=false", "strategy.bucket_lengths=[1, 1, 1, 1, 1, 1, 2]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def launched(folder):
    return train(folder, "launched", *FIXED, "--workers", "3")[1]


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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    start = [*torchrun, *where[rendezvous], "-m", "stretto"]
    output, tensors = train(folder, rendezvous, *FIXED, start=start)
    assert same(tensors, launched)
    assert "3 workers on 1 host" in output


def test_srun_on_two_uneven_nodes_gives_the_same_bits(folder, launched, slurm):
    start = ["srun", "-N2", "-n3", *STRETTO]
    output, tensors = train(folder, "srun", *FIXED, start=start, environ=slurm.environ)
    assert same(tensors, launched)
    assert "3 workers on 2 hosts" in output


def test_mpirun_gives_the_same_bits(folder, launched, mpirun):
    start = [*mpirun, "-n", "3", *STRETTO]
    output, tensors = train(folder, "mpirun", *FIXED, start=start)
    assert same(tensors, launched)
    assert "3 workers on 1 host" in output

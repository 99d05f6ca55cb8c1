"""Several NCCL ranks on one GPU: the sums of every algorithm, and a peer that dies."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(420),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

ROOT = Path(__file__).parents[2]
RANK = [sys.executable, "tests/gpu/nccl_rank.py"]
CHECKS = ["check_allreduce", "check_others", "check_many_in_flight", "check_no_allocation"]
TIMEOUT_S = 20
"""Time-out of a collective in `nccl_rank.py`; NCCL's own is three times as long."""
STARTING_S = 40
"""Time in which ranks import, rendezvous and open their communicators, several on one GPU."""


def on_one_gpu(
    hosts: int, per_host: int, command: list[str], limit_s: float
) -> tuple[int, str, str]:
    """Run the command as every rank; return (exit code, rank 0's stdout, stderr).

    The exit code is the first one that is not 0. The output of other ranks is part of stderr.
    """
    shape = ["--hosts", str(hosts), "--ranks-per-host", str(per_host)]
    ranks = subprocess.Popen(
        [sys.executable, "benchmarks/one_gpu.py", *shape, "--", *command],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },  # the ranks can import the same modules
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, said = ranks.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        pytest.fail(f"ranks still ran after {limit_s} s; they said: {_ended(ranks)}")
    return ranks.returncode, out, said


def _ended(ranks: "subprocess.Popen[str]") -> str:
    """End the ranks and their parent process; return their output."""
    for signal_number in (signal.SIGINT, signal.SIGKILL):  # SIGINT also ends the MPS daemon
        os.killpg(ranks.pid, signal_number)
        try:
            return "\n".join(ranks.communicate(timeout=15))
        except subprocess.TimeoutExpired:
            continue
    return "nothing: they could not be ended"


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 2), (4, 1)])
def test_every_collective_holds_on_a_gpu(hosts, per_host):
    code, out, said = on_one_gpu(hosts, per_host, [*RANK, "laws"], limit_s=300)
    assert code == 0, said
    held = [line.split()[0] for line in out.splitlines() if " held in " in line]
    assert held == CHECKS
    assert out.splitlines()[-1] == "all held"


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 2), (4, 1)])
def test_when_a_peer_dies_every_other_rank_ends_and_names_the_collective(hosts, per_host):
    limit_s = STARTING_S + TIMEOUT_S + 15
    code, out, said = on_one_gpu(hosts, per_host, [*RANK, "death"], limit_s)
    # The first code that is not 0 is that of rank 0, not the 9 of rank 1.
    assert code not in (0, 9), said
    assert "all held" not in out
    assert "came to its end" not in said
    for rank in set(range(hosts * per_host)) - {1}:
        # Named by the watchdog, or by a call that NCCL refused because it noticed first.
        watched = r"ring/2 over 1000000 x torch\.float32 (has not finished after|failed on)"
        refused = rf"NCCL gave up: .*; in ring/2 for {hosts * per_host} ranks, round "
        named = f"rank {rank}: ({watched}|{refused})"
        assert re.search(named, said), f"rank {rank} did not say so: {said}"

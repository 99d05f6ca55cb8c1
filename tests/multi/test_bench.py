"""``stretto bench step`` with real peers, small: the rows every benchmark promises."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.multi, pytest.mark.timeout(200)]

KEYS = {"case", "ours_s", "peer", "peer_s", "bound_s", "runs", "spread"}


def test_a_step_is_timed_against_ddp_at_every_bucket_size():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    small = ["model.blocks=1", "model.width=32", "--runs", "2", "--json"]
    done = subprocess.run(
        [*torchrun, "stretto", "bench", "step", *small],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all(set(row) == KEYS and row["runs"] == 2 for row in rows)
    assert len([row for row in rows if row["peer"].startswith("ddp")]) == 5
    tuned = [row for row in rows if row["peer"].endswith("(tuned)")]
    assert tuned[0]["peer_s"] == min(r["peer_s"] for r in rows if r["peer"].startswith("ddp"))


def test_one_rank_alone_is_told_how_to_start_more():
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "bench", "step"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "stretto lab --hosts 4" in done.stderr

"""``stretto calibrate`` with real ranks: a file that is read back, and added to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cluster.world import Mesh
from stretto.comm.algorithms.table import parse_table
from stretto.sim.choosing import SIZES
from stretto.sim.cluster import load_cluster

pytestmark = [pytest.mark.multi, pytest.mark.timeout(200)]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def calibrate(folder: Path, ranks: int, *arguments: str) -> str:
    done = subprocess.run(
        [*TORCHRUN, str(ranks), "-m", "stretto", "calibrate", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_description_is_written_and_the_next_calibration_is_added_to_it(tmp_path):
    rows = [json.loads(line) for line in calibrate(tmp_path, 2, "--runs", "1", "--json").splitlines()]
    path = tmp_path / "cluster.toml"
    first = load_cluster(path)
    assert [row["bytes"] for row in rows] == list(SIZES)
    assert all(set(row) == {"bytes", "algorithm", "seconds", "reason"} for row in rows)
    assert all(row["seconds"] > 0 for row in rows)
    assert first.mesh == Mesh((2,))
    table = parse_table(first.tables["1x2"])
    assert [table.pick(size).word for size in SIZES] == [row["algorithm"] for row in rows]

    again = calibrate(tmp_path, 3, "--no-table")
    second = load_cluster(path)
    assert second.to_toml() in again
    assert second.tables == first.tables  # other ranks, no table: the one there was is kept
    assert second.mesh == Mesh((3,))
    assert second.between == first.between  # nothing was met there
    assert second.inside != first.inside
    figures = (second.inside.bytes_per_s, second.cpu.s_per_byte_inside, second.cpu.s_per_byte_added)
    assert all(figure > 0 for figure in figures)

"""``stretto calibrate`` on two ranks: it writes a cluster description, and updates one."""

from pathlib import Path

import pytest

from stretto.cluster.world import Mesh
from stretto.simulator.cluster import load_cluster
from tests.multi.two_ranks import on_two_ranks

pytestmark = [pytest.mark.multi, pytest.mark.timeout(200)]


def calibrate(folder: Path) -> str:
    done = on_two_ranks(folder, ["calibrate", "--no-table"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_description_is_written_and_updated_by_the_next_calibration(tmp_path):
    path = tmp_path / "cluster.toml"
    output = calibrate(tmp_path)
    first = load_cluster(path)
    assert first.to_toml() in output
    assert first.mesh == Mesh((2,))
    figures = (first.inside.bytes_per_s, first.cpu.s_per_byte_inside, first.cpu.s_per_byte_added)
    assert all(figure > 0 for figure in figures)

    more = {"name": "mine", "tables": {"2x4": "ring"}, "ranks_per_host": (4, 4)}
    first.model_copy(update=more).write(path)
    calibrate(tmp_path)
    second = load_cluster(path)
    assert (second.name, second.tables) == ("mine", {"2x4": "ring"})
    assert second.mesh == Mesh((2,))
    assert second.between == first.between  # with one host nothing is measured between hosts
    assert second.inside != first.inside  # measured again

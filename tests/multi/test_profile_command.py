"""``stretto profile`` on two ranks: rank 0 writes one profile."""

import pytest

from stretto.planner.profile import read_profile
from tests.multi.small_run import RUN
from tests.multi.two_ranks import on_two_ranks

pytestmark = [pytest.mark.multi, pytest.mark.timeout(200)]

SHARDED = RUN.replace(
    'bucket_bytes = "2KB"\nalgorithm = "native, ring from 1KB"', 'kind = "sharded"'
)


def profile(folder, *arguments):
    (folder / "run.toml").write_text(SHARDED)
    return on_two_ranks(folder, ["profile", "run.toml", "strategy.unit=1KB", *arguments])


def test_units_and_messages_of_two_ranks_are_measured(tmp_path):
    done = profile(tmp_path, "--repeats", "2", "--out", "p.json")
    assert done.returncode == 0, done.stderr
    found = read_profile(tmp_path / "p.json")
    assert (found.link.ranks, found.link.lanes) == (2, 3)
    assert found.link.bytes_per_s > 1e6
    assert found.slowdown >= 1
    assert found.compute_s > 0
    assert found.source == "measured on cpu, 1x2"
    assert done.stdout.count("link of 2 ranks") == 1, "only rank 0 prints"
    assert len(found.units) > 2


def test_a_cluster_description_replaces_measured_messages_and_bf16_halves_widths(tmp_path):
    arguments = ["--cluster", "box 400mbit", "strategy.wire=bf16", "--repeats", "1"]
    done = profile(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    found = read_profile(tmp_path / "profile.json")
    assert (found.link.ranks, found.gradient_bytes, found.parameter_bytes) == (4, 2, 4)
    assert "messages of" not in done.stderr
    assert found.slowdown >= 1

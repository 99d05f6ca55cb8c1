"""Cluster descriptions are written as TOML, read back, and checked."""

import pytest

from stretto.cluster.world import Mesh
from stretto.errors import ConfigError
from stretto.simulator import PRESETS, load_cluster, preset

SMALL = """
ranks_per_host = "2x2"
[between]
latency_s = 1e-5
bytes_per_s = 1e9
[inside]
latency_s = 0
bytes_per_s = 1e10
"""


@pytest.mark.parametrize("name", PRESETS)
def test_a_cluster_is_read_back_equal(name, tmp_path):
    for shape in (PRESETS[name].ranks_per_host, (3, 1, 4)):
        cluster = PRESETS[name].with_mesh(Mesh(shape))
        cluster.write(tmp_path / "cluster.toml")
        assert load_cluster(tmp_path / "cluster.toml") == cluster


def test_a_cluster_on_another_mesh_keeps_links_and_cores():
    cluster = preset("box 400mbit").with_mesh(Mesh((8,) * 1250))
    assert cluster.mesh.size == 10_000
    assert cluster.between == preset("box 400mbit").between
    assert 'ranks_per_host = "1250x8"' in cluster.to_toml()


def test_missing_costs_are_zero(tmp_path):
    (tmp_path / "cluster.toml").write_text(SMALL)
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert cluster.ranks_per_host == (2, 2)
    assert (cluster.cpu.s_per_message, cluster.native_latency_s) == (0, 0)


@pytest.mark.parametrize(
    ("setting", "replacement", "message"),
    [
        ('"2x2"', '"2 by 2"', "expected hosts x ranks"),
        ('"2x2"', '"0x2"', "expected hosts x ranks"),
        ('"2x2"', "[2, 0]", "at least 1"),
        ("latency_s = 0", "latency_s = -1", "at least 0"),
        ("bytes_per_s = 1e9", "bytes_per_s = 0", "above 0"),
        ("bytes_per_s = 1e9", "bytes_per_second = 1e9", 'did you mean "bytes_per_s"'),
        ("[inside]", '[cpu]\npool = "node"\n[inside]', "cluster.toml: cpu.pool"),
    ],
)
def test_a_wrong_description_is_refused_with_file_and_key(setting, replacement, message, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(SMALL.replace(setting, replacement))
    with pytest.raises(ConfigError, match=message):
        load_cluster(path)


def test_a_missing_description_says_how_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match="stretto calibrate"):
        load_cluster(tmp_path / "none.toml")


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'box 400mbit'"):
        preset("box 400 mbit")

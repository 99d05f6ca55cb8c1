"""What a run leaves open is chosen from a cluster's description, once, and written down."""

from pathlib import Path

import pytest
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.comm.algorithms.table import parse_table
from stretto.config import load
from stretto.config.write import to_toml
from stretto.errors import ConfigError
from stretto.run import RunConfig, prepare, resolve_run
from stretto.sim.choosing import choose_stream
from stretto.sim.cluster import load_cluster
from stretto.sim.fusion import fusion_threshold
from stretto.sim.presets import preset
from stretto.strategy import AllReduceConfig, bucket_cuts, tuned

TABLE = "doubling, hierarchical/8 from 64KB, ring/4 from 100MB"
HOSTS = Mesh((2, 2))


@pytest.fixture
def cluster(tmp_path) -> str:
    """Describe a cluster whose table for 2x2 was measured."""
    path = tmp_path / "cluster.toml"
    preset("box 400mbit").model_copy(update={"tables": {HOSTS.shape: TABLE}}).write(path)
    return str(path)


def chosen(mesh=HOSTS, **settings) -> AllReduceConfig:
    return tuned(AllReduceConfig(**settings), mesh, nn.Linear(2, 2))


@pytest.mark.parametrize("mesh", [Mesh((1,)), Mesh((4,)), HOSTS])
@pytest.mark.parametrize("table", ["ring", "native, ring/4 from 1KB", TABLE])
def test_a_table_that_is_given_stays_as_it_is(table, mesh, cluster):
    assert chosen(mesh, algorithm=table).algorithm == table
    assert chosen(mesh, algorithm=table, cluster=cluster).algorithm == table


@pytest.mark.parametrize("mesh", [Mesh((1,)), Mesh((4,))])
def test_on_one_host_that_nobody_described_the_back_end_is_taken(mesh):
    assert chosen(mesh) == AllReduceConfig(algorithm="native", fusion=4_000_000)
    assert chosen(mesh, wire="fp8").algorithm == "ring"


def test_hosts_that_nobody_described_are_taken_to_be_on_ethernet():
    table = choose_stream(preset("ethernet 10gbit"), HOSTS)
    assert chosen(HOSTS) == AllReduceConfig(algorithm=str(table), fusion=4_000_000)
    assert "native" not in chosen(HOSTS, wire="fp8").algorithm


@pytest.mark.parametrize("mesh", [HOSTS, Mesh((2, 2, 2))])
def test_buckets_go_whole_by_what_is_cheapest_in_a_row_on_the_described_cluster(cluster, mesh):
    picked = chosen(mesh, cluster=cluster, fusion="2MB").algorithm
    assert picked == str(choose_stream(load_cluster(Path(cluster)), mesh))
    assert all(choice.parts == 1 for choice in parse_table(picked).choices)


def test_fusion_follows_from_the_cluster_unless_it_is_set(cluster):
    described = load_cluster(Path(cluster)).with_mesh(HOSTS)
    wanted = fusion_threshold(described, choose_stream(described, HOSTS))
    assert chosen(cluster=cluster).fusion == wanted
    assert chosen(cluster=cluster, fusion="123KB").fusion == 123_000
    assert chosen(Mesh((1,)), cluster=cluster).fusion == 4_000_000


def test_a_fusion_of_zero_is_one_every_gradient_travels_alone():
    settled = chosen(Mesh((4,)), fusion=0)
    assert settled.fusion == 0
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert bucket_cuts(settled, model) == (1, 1, 1, 1)


def test_the_back_end_is_not_taken_for_a_wire_it_cannot_sum(tmp_path):
    path = tmp_path / "cluster.toml"
    preset("box 400mbit").model_copy(update={"tables": {HOSTS.shape: "native"}}).write(path)
    assert "native" not in chosen(cluster=str(path), wire="fp8").algorithm


@pytest.mark.parametrize("table", ["native", "ring, native from 1MB"])
def test_fp8_and_the_back_ends_own_sum_are_refused_by_name(table):
    with pytest.raises(ConfigError) as wrong:
        load(RunConfig, None, ["strategy.wire=fp8", f"strategy.algorithm={table}"])
    assert "wire 'fp8'" in str(wrong.value)
    assert f"strategy.algorithm = {table!r}" in str(wrong.value)


def test_the_largest_entries_need_no_algorithm_so_any_will_do():
    assert chosen(algorithm="native", wire="topk 1%").algorithm == "native"


def test_a_description_that_is_not_there_is_named_with_what_to_do(tmp_path):
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"no cluster description .*none\.toml.*calibrate"):
        chosen(cluster=str(missing))
    loaded = load(RunConfig, None, [f"strategy.cluster={missing}"])
    with pytest.raises(ConfigError, match=r"none\.toml"):
        prepare(loaded.config)


@pytest.mark.parametrize("mesh", [Mesh((3,)), HOSTS])
@pytest.mark.parametrize("settings", [[], ["strategy.wire=fp8"], ["strategy.fusion=30KB"]])
def test_a_resolved_run_fed_back_gives_the_same(mesh, settings, cluster, tmp_path):
    for more in ([], [f"strategy.cluster={cluster}"]):
        loaded = load(RunConfig, None, [*settings, *more, "data.samples=64", "model.width=4"])
        model = prepare(loaded.config).model
        world = World(0, mesh, threads=1)
        resolved = resolve_run(loaded, world, model)
        assert resolved.config.strategy.algorithm != "auto"
        assert resolved.config.strategy.cuts == bucket_cuts(resolved.config.strategy, model)
        path = tmp_path / "resolved.toml"
        path.write_text(to_toml(resolved))
        again = load(RunConfig, path)
        assert again.config == resolved.config
        assert resolve_run(again, world, model).config == resolved.config
        # Where it goes on with other ranks, it is still what it was.
        assert resolve_run(again, World(0, Mesh((5,))), model).config == resolved.config

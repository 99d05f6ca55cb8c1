"""Settings that a run leaves open are chosen once from a cluster's description and recorded."""

from pathlib import Path

import pytest
from torch import nn

from stretto.cluster.world import Mesh, World
from stretto.collectives.algorithm_table import parse_table
from stretto.config import load
from stretto.config.load import to_toml
from stretto.errors import ConfigError
from stretto.run import RunConfig, prepare, resolve_run
from stretto.simulator.algorithm_choice import choose_back_to_back_table, choose_bucket_bytes
from stretto.simulator.cluster import load_cluster, preset
from stretto.strategies import AllReduceConfig, resolve_bucket_lengths, tune_config

TABLE = "doubling, hierarchical/8 from 64KB, ring/4 from 100MB"
HOSTS = Mesh((2, 2))


@pytest.fixture
def cluster(tmp_path) -> str:
    """Describe a cluster whose table for 2x2 was measured."""
    path = tmp_path / "cluster.toml"
    preset("box 400mbit").model_copy(update={"tables": {HOSTS.shape: TABLE}}).write(path)
    return str(path)


def chosen(mesh=HOSTS, **settings) -> AllReduceConfig:
    return tune_config(AllReduceConfig(**settings), mesh, nn.Linear(2, 2))


@pytest.mark.parametrize("mesh", [Mesh((1,)), Mesh((4,)), HOSTS])
@pytest.mark.parametrize("table", ["ring", "native, ring/4 from 1KB", TABLE])
def test_a_table_that_is_given_stays_as_it_is(table, mesh, cluster):
    assert chosen(mesh, algorithm=table).algorithm == table
    assert chosen(mesh, algorithm=table, cluster=cluster).algorithm == table


@pytest.mark.parametrize("mesh", [Mesh((1,)), Mesh((4,))])
def test_one_host_without_a_description_uses_the_back_end(mesh):
    assert chosen(mesh) == AllReduceConfig(algorithm="native", bucket_bytes=4_000_000)
    assert chosen(mesh, wire="fp8").algorithm == "ring"


def test_hosts_without_a_description_are_taken_to_be_on_ethernet():
    table = choose_back_to_back_table(preset("ethernet 10gbit"), HOSTS)
    assert chosen(HOSTS) == AllReduceConfig(algorithm=str(table), bucket_bytes=4_000_000)
    assert "native" not in chosen(HOSTS, wire="fp8").algorithm


@pytest.mark.parametrize("mesh", [HOSTS, Mesh((2, 2, 2))])
def test_buckets_go_whole_by_what_is_cheapest_in_a_row_on_the_described_cluster(cluster, mesh):
    picked = chosen(mesh, cluster=cluster, bucket_bytes="2MB").algorithm
    assert picked == str(choose_back_to_back_table(load_cluster(Path(cluster)), mesh))
    assert all(choice.parts == 1 for choice in parse_table(picked).choices)


def test_bucket_bytes_follow_from_the_cluster_unless_set(cluster):
    described = load_cluster(Path(cluster)).with_mesh(HOSTS)
    expected = choose_bucket_bytes(described, choose_back_to_back_table(described, HOSTS))
    assert chosen(cluster=cluster).bucket_bytes == expected
    assert chosen(cluster=cluster, bucket_bytes="123KB").bucket_bytes == 123_000
    assert chosen(Mesh((1,)), cluster=cluster).bucket_bytes == 4_000_000


def test_bucket_bytes_of_zero_give_every_gradient_a_bucket_of_its_own():
    tuned = chosen(Mesh((4,)), bucket_bytes=0)
    assert tuned.bucket_bytes == 0
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert resolve_bucket_lengths(tuned, model) == (1, 1, 1, 1)


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
@pytest.mark.parametrize("settings", [[], ["strategy.wire=fp8"], ["strategy.bucket_bytes=30KB"]])
def test_a_resolved_run_fed_back_gives_the_same(mesh, settings, cluster, tmp_path):
    for more in ([], [f"strategy.cluster={cluster}"]):
        loaded = load(RunConfig, None, [*settings, *more, "data.samples=64", "model.width=4"])
        model = prepare(loaded.config).model
        world = World(0, mesh, threads=1)
        resolved = resolve_run(loaded, world, model)
        assert resolved.config.strategy.algorithm != "auto"
        assert resolved.config.strategy.bucket_lengths == resolve_bucket_lengths(
            resolved.config.strategy, model
        )
        path = tmp_path / "resolved.toml"
        path.write_text(to_toml(resolved))
        again = load(RunConfig, path)
        assert again.config == resolved.config
        assert resolve_run(again, world, model).config == resolved.config
        # Where it goes on with other ranks, it is still what it was.
        assert resolve_run(again, World(0, Mesh((5,))), model).config == resolved.config

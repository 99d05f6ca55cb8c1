"""Algorithm tables chosen by price, and measured tables."""

import pytest

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import parse_table
from stretto.collectives.algorithms import ALLREDUCE
from stretto.collectives.schedule import pipeline_tensor
from stretto.simulator import PRESETS, algorithm_choice, preset, price
from stretto.simulator.algorithm_choice import (
    LARGE_MESSAGE_PARTS,
    LARGE_SIZES,
    SMALL_SIZES,
    TABLE_SIZES,
    AlgorithmRecommendation,
    choose_back_to_back_table,
    choose_isolated_table,
    choose_table,
    recommend_by_size,
    table_of,
)
from stretto.simulator.price_cache import PriceCache

SHAPES = [(1,) * 4, (2, 2), (3, 1)]


def fail_if_priced(*_):
    raise AssertionError("nothing is to be priced here")


def seconds(cluster, name, parts, size):
    return price(ALLREDUCE[name](cluster.mesh, parts), size, cluster).seconds


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_the_choice_is_within_one_percent_of_the_cheapest_at_every_size(name, shape):
    cluster = preset(name).with_mesh(Mesh(shape))
    table = choose_table(cluster, cluster.mesh)
    for size in TABLE_SIZES:
        choice = table.pick(size)
        whole = [seconds(cluster, other, 1, size) for other in ALLREDUCE]
        assert seconds(cluster, choice.name, choice.parts, size) <= 1.01 * min(whole)
        if size in LARGE_SIZES:
            for parts in LARGE_MESSAGE_PARTS:
                assert seconds(cluster, choice.name, choice.parts, size) <= 1.01 * seconds(
                    cluster, choice.name, parts, size
                )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lower_bounds_rule_out_no_near_best_algorithm(shape):
    cluster = preset("ethernet 10gbit").with_mesh(Mesh(shape))
    price_cache = PriceCache(cluster, ALLREDUCE)
    whole = price_cache.candidates((1,))
    for within in (1.01, 1.5):
        near_best = PriceCache(cluster, ALLREDUCE).near_best(whole, TABLE_SIZES, within)
        for size in TABLE_SIZES:
            all_prices = price_cache.all_prices(whole, [size]).rows
            limit_s = within * all_prices[0].price.seconds
            expected = [row.name for row in all_prices if row.price.seconds <= limit_s]
            assert [row.name for row in near_best.at(size)] == expected


def test_most_candidates_are_never_priced(monkeypatch):
    cluster = preset("ethernet 10gbit").with_mesh(Mesh((4,) * 4))
    priced = []
    row = PriceCache.row

    def counted(price_cache, candidate, num_bytes):
        priced.append((candidate, num_bytes))
        return row(price_cache, candidate, num_bytes)

    monkeypatch.setattr(PriceCache, "row", counted)
    choose_table(cluster, cluster.mesh)
    everything = len(ALLREDUCE) * (len(SMALL_SIZES) + len(LARGE_SIZES) * len(LARGE_MESSAGE_PARTS))
    assert len(set(priced)) < everything / 2


def test_a_measured_table_is_used_unchanged(monkeypatch):
    measured = "doubling, native from 8KB, hierarchical/8 from 1MB"
    cluster = preset("box 400mbit").model_copy(update={"tables": {"2x2": measured}})
    monkeypatch.setattr(algorithm_choice, "recommend_by_size", fail_if_priced)
    assert choose_table(cluster, Mesh((2, 2))) == parse_table(measured)


def test_a_measured_table_with_native_is_not_used_where_native_is_excluded():
    cluster = preset("box 400mbit").model_copy(update={"tables": {"2x2": "native"}})
    table = choose_table(cluster, Mesh((2, 2)), native=False)
    assert "native" not in [choice.name for choice in table.choices]


def test_one_host_without_a_description_uses_native(monkeypatch):
    monkeypatch.setattr(algorithm_choice, "recommend_by_size", fail_if_priced)
    assert str(choose_table(None, Mesh((4,)))) == "native"
    assert str(choose_table(None, Mesh((4,)), native=False)) == "ring"


def test_several_hosts_without_a_description_are_assumed_to_use_ethernet():
    mesh = Mesh((2, 2))
    assert choose_table(None, mesh) == choose_table(preset("ethernet 10gbit"), mesh)


def test_native_is_left_out_where_it_is_excluded(monkeypatch):
    monkeypatch.setattr(
        algorithm_choice, "ALLREDUCE", {n: ALLREDUCE[n] for n in ("native", "doubling")}
    )
    cluster, mesh = preset("ethernet 10gbit"), Mesh((1,) * 6)
    assert choose_table(cluster, mesh).pick(10**9).name == "native"
    names = {choice.name for choice in choose_table(cluster, mesh, native=False).choices}
    assert names == {"doubling"}


def test_recommendations_have_reasons_and_the_table_is_read_back_equal():
    cluster = preset("gpu nodes 100gbit").with_mesh(Mesh((4, 4)))
    rows = recommend_by_size(cluster)
    assert all(row.reason for row in rows)
    assert rows[0].reason == "3 serial messages instead of 14 with ring"
    table = table_of(rows)
    assert parse_table(str(table)) == table
    assert [choice.min_bytes for choice in table.choices] == [0, *(r.from_bytes for r in rows[1:])]
    assert all(choice.parts == 1 for choice in table.choices if choice.min_bytes < LARGE_SIZES[0])


def test_a_table_begins_at_zero_bytes():
    rows = [
        AlgorithmRecommendation(1_000, "doubling", 1, 0.1, ""),
        AlgorithmRecommendation(4_000_000, "ring", 2, 0.2, ""),
    ]
    assert str(table_of(rows)) == "doubling, ring/2 from 4MB"


def test_equal_prices_up_to_rounding_keep_the_order_of_the_candidates():
    # With hosts of two, halving begins inside them, so both algorithms do the same.
    cluster = preset("box 400mbit").with_mesh(Mesh((2,) * 8))
    price_cache = PriceCache(cluster, ALLREDUCE)
    same = [(name, 1) for name in ("halving-doubling", "hierarchical-halving")]
    assert [row.name for row in price_cache.all_prices(same, [64_000]).rows] == [
        name for name, _ in same
    ]


def test_back_to_back_messages_prefer_algorithms_with_lanes():
    """For a single 1 MB message halving-doubling wins; in a row, phases on lanes overlap."""
    box, mesh = preset("box 400mbit"), Mesh((4, 4))
    table = choose_back_to_back_table(box, mesh)
    assert table.pick(1_000_000).name.startswith("hierarchical")
    assert all(choice.parts == 1 for choice in table.choices)
    where = box.with_mesh(mesh)

    def back_to_back_s(name):
        return price(pipeline_tensor(ALLREDUCE[name](mesh, 1), 8), 8_000_000, where).seconds

    best_s = min(back_to_back_s(name) for name in ALLREDUCE)
    assert back_to_back_s(table.pick(1_000_000).name) <= 1.01 * best_s


def test_back_to_back_messages_on_one_host_without_a_description_use_native():
    assert str(choose_back_to_back_table(None, Mesh((4,)))) == "native"
    assert "native" not in str(choose_back_to_back_table(None, Mesh((4,)), native=False))


@pytest.mark.parametrize("native", [True, False])
def test_a_table_for_isolated_messages_has_the_cheapest_algorithm_of_each_size(native):
    cluster = preset("ethernet 10gbit").with_mesh(Mesh((2,) * 4))
    sizes = (10_000, 4_000_000)
    table = choose_isolated_table(cluster, sizes, native=native)
    names = [name for name in ALLREDUCE if native or name != "native"]
    for size in sizes:
        choice = table.pick(size)
        assert choice.parts == 1
        cheapest_s = min(seconds(cluster, name, 1, size) for name in names)
        assert seconds(cluster, choice.name, 1, size) <= 1.01 * cheapest_s
    assert table.pick(0) == table.pick(sizes[0])

"""Prices of all algorithms at several sizes, and recommendations from them."""

import itertools

import pytest

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALLREDUCE
from stretto.errors import ConfigError, StrettoError
from stretto.simulator import preset, price_all_algorithms, recommend_algorithms

SIZES = (1_000, 100_000, 10_000_000)
SOME = {name: ALLREDUCE[name] for name in ("native", "ring", "doubling", "hierarchical")}


@pytest.fixture(scope="module")
def box():
    return preset("box 400mbit").with_mesh(Mesh((4, 4)))


def test_rows_are_sorted_by_size_and_price(box):
    rows = price_all_algorithms(box, SIZES, (1, 2), SOME).rows
    keys = [(row.num_bytes, row.price.seconds) for row in rows]
    assert keys == sorted(keys)
    assert {row.name for row in rows} == set(SOME)


def test_parts_that_change_nothing_are_priced_once(box):
    rows = price_all_algorithms(box, (1_000,), (1, 2, 4), SOME).rows
    assert [row.parts for row in rows if row.name == "native"] == [1]
    assert sorted(row.parts for row in rows if row.name == "hierarchical") == [1, 2, 4]


def test_the_recommendation_is_within_one_percent_of_the_cheapest(box):
    prices = price_all_algorithms(box, SIZES, (1, 2), SOME)
    choices = recommend_algorithms(box, SIZES, (1, 2), SOME)
    for size in SIZES:
        best = [c for c in choices if c.from_bytes <= size][-1]
        row = next(r for r in prices.at(size) if (r.name, r.parts) == (best.name, best.parts))
        assert row.price.seconds <= 1.01 * prices.at(size)[0].price.seconds


def test_recommendations_have_growing_sizes_and_change_the_algorithm(box):
    choices = recommend_algorithms(box, SIZES, (1, 2), SOME)
    assert choices[0].from_bytes == SIZES[0]
    assert [c.from_bytes for c in choices] == sorted({c.from_bytes for c in choices})
    picks = [(c.name, c.parts) for c in choices]
    assert all(a != b for a, b in itertools.pairwise(picks))


def test_reasons_name_messages_bytes_or_overlap(box):
    flat = preset("gpu nodes 100gbit").with_mesh(Mesh((1,) * 8))
    assert recommend_algorithms(flat, (1_000,), (1,), SOME)[0].reason == (
        "3 serial messages instead of 14 with ring"
    )
    assert recommend_algorithms(box, (32_000_000,), (1,), SOME)[0].reason == (
        "each link carries 32 MB instead of 56 MB with ring"
    )
    only = {"hierarchical": ALLREDUCE["hierarchical"], "native": ALLREDUCE["native"]}
    slow_inside = box.model_copy(
        update={"inside": box.inside.model_copy(update={"bytes_per_s": 60e6})}
    )
    assert (
        "8 parts overlap"
        in recommend_algorithms(slow_inside, (32_000_000,), (1, 8), only)[0].reason
    )


def test_a_single_algorithm_has_no_comparison_as_reason(box):
    assert recommend_algorithms(box, (1_000,), (1,), {"ring": ALLREDUCE["ring"]})[0].reason == (
        "the only algorithm there is"
    )


def test_an_algorithm_that_cannot_be_priced_is_left_out_with_the_reason():
    uneven = preset("box 400mbit").with_mesh(Mesh((*(8,) * 300, 7)))
    prices = price_all_algorithms(
        uneven, (1_000,), (1,), {"ring": ALLREDUCE["ring"], "binomial": ALLREDUCE["binomial"]}
    )
    assert [row.name for row in prices.rows] == ["binomial"]
    assert "equally many ranks" in prices.left_out["ring"]
    with pytest.raises(StrettoError, match="none of the algorithms could be priced"):
        recommend_algorithms(uneven, (1_000,), (1,), {"ring": ALLREDUCE["ring"]})


def test_a_recommendation_needs_sizes(box):
    with pytest.raises(ConfigError, match="no message sizes"):
        recommend_algorithms(box, ())

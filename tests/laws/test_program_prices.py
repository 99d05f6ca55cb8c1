"""Prices of step programs: those of before, and of the settings that had none."""

import json
from functools import cache

import pytest

from stretto.cluster.detect import detect_world
from stretto.cluster.world import Mesh
from stretto.errors import ConfigError
from stretto.strategies import STRATEGIES
from stretto.studies.priced_run import CostSource, find_variants
from stretto.studies.strategy_prices import Predictor
from tests.golden.step_prices import FILE, GPT, MESHES, RUNS, cluster, price

BEFORE = json.loads(FILE.read_text())
FOUR, PAIRS = Mesh((1,) * 4), Mesh((2, 2))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "gpt.toml"
    path.write_text(GPT)
    return path


@cache
def predictor():
    return Predictor(CostSource(cluster(), "links", device="4e7,1e10"), detect_world())


def priced(run, spec, mesh=FOUR, *overrides):
    (variant,) = find_variants(run, overrides, spec)
    return predictor().price(variant.config, mesh)


SMOKE = ("4", "2x2", "16x8")
"""The meshes that are compared in each test run; all seven were when prices moved to programs."""


@pytest.mark.parametrize("name", [name for name in BEFORE if name.endswith(SMOKE)])
def test_a_price_is_that_of_before(run, name):
    kind, spec, mesh = name.split(" | ")
    (variant,) = find_variants(run, RUNS[kind], spec)
    now, before = price(predictor(), variant, Mesh(MESHES[mesh])), BEFORE[name]
    assert now.keys() == before.keys()
    breakdowns = [row.pop("breakdown_s", {}) for row in (now, before)]
    assert breakdowns[0] == pytest.approx(breakdowns[1], rel=1e-12, abs=1e-15)
    for key, value in before.items():
        expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-12, abs=1e-15)
        assert now[key] == expected, key


NEW = [
    "crossover:wire=fp8",
    "crossover:wire=fp8:groups=2:delay=1",
    "crossover:exact_every=3",
    "crossover:exact_every=2:groups=2",
    "crossover:consensus_every=2:consensus_limit=0.1",
    "crossover:mix=gradients",
    "crossover:mix=gradients:groups=2",
    "sgp:exact_every=4:delay=1",
]


@pytest.mark.parametrize("spec", NEW)
def test_settings_that_had_no_price_have_one_that_is_not_below_its_bound(run, spec):
    found = priced(run, spec, PAIRS)
    assert found.seconds >= found.bound_s * (1 - 1e-9) > 0
    assert found.seconds >= found.compute_s


def test_every_strategy_has_a_price(run):
    for kind in STRATEGIES:
        assert priced(run, kind).seconds > 0


def test_eight_bits_cross_a_link_with_a_scale_for_each_block(run):
    whole, eight = priced(run, "crossover").bytes_per_link, priced(run, "crossover:wire=fp8")
    assert whole / 4 < eight.bytes_per_link < whole / 4 * 1.03


def test_an_exact_average_adds_its_time_to_the_steps_between_two(run):
    single = priced(run, "crossover:every=1000")
    average = priced(run, "crossover:every=1000:exact_every=4")
    model_bytes = priced(run, "crossover").bytes_per_link
    link_s = model_bytes / cluster().between.bytes_per_s
    assert single.seconds == pytest.approx(single.compute_s, rel=1e-2)
    # A ring sends 1.5 times the model, recursive doubling twice.
    assert 1.5 * link_s / 4 < average.seconds - single.seconds < 2.2 * link_s / 4
    assert average.bytes_per_link > single.bytes_per_link + 0.9 * 2 * 3 / 4 * model_bytes / 4


def test_gradients_that_are_mixed_are_awaited_before_the_update(run):
    parameters, gradients = priced(run, "crossover"), priced(run, "crossover:mix=gradients")
    assert gradients.bytes_per_link == pytest.approx(parameters.bytes_per_link, rel=1e-3)
    assert gradients.exposed_s > parameters.exposed_s  # forward hides nothing of it


def test_a_measurement_costs_no_more_than_its_messages(run):
    plain = priced(run, "crossover:delay=1")
    measured = priced(run, "crossover:delay=1:consensus_every=1")
    assert plain.seconds <= measured.seconds <= 1.05 * plain.seconds
    assert measured.bytes_per_link > plain.bytes_per_link


def test_a_sparse_wire_is_refused_by_name(run):
    with pytest.raises(ConfigError, match="depends on the gradients"):
        priced(run, "allreduce:wire=topk 1%")

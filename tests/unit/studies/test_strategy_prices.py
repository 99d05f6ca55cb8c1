"""The price of a step for every strategy, and the settings that change it."""

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest

from stretto.cli.main import main
from stretto.cluster.detect import detect_world
from stretto.cluster.world import Mesh
from stretto.errors import ConfigError
from stretto.planner.profile import read_profile
from stretto.simulator.cluster import Cluster, Cpu, LinkCosts
from stretto.strategies import STRATEGIES, CrossoverConfig
from stretto.studies.priced_run import CostSource, PricedRun, find_variants
from stretto.studies.strategy_prices import Predictor, price_strategies

GPT = """
[model]
kind = "gpt"
blocks = 4
width = 32
heads = 2
context = 16
vocab = 64
[optim]
kind = "sgd"
lr = 0.1
[train]
batch = 8
"""
RATE = 200_000.0
"""Bytes a second. Sending the model takes about as long as computing a step on a slow core."""
DEVICE = "4e7,1e10"
MESH = Mesh((1,) * 4)
WITH_PRICE = list(STRATEGIES)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "gpt.toml"
    path.write_text(GPT)
    return path


@cache
def links(rate: float = RATE, pool: str = "host") -> Cluster:
    return Cluster(
        ranks_per_host=(1,),
        between=LinkCosts(latency_s=1e-4, bytes_per_s=rate),
        inside=LinkCosts(latency_s=1e-5, bytes_per_s=100 * rate),
        cpu=Cpu(pool=pool, cores=2),
    )


def predictor(rate: float = RATE, device: str = DEVICE, **more) -> Predictor:
    return Predictor(CostSource(links(rate), "links", device=device), detect_world(), **more)


def price(run: Path, *overrides: str, mesh: Mesh = MESH, rate: float = RATE, **more):
    (variant,) = find_variants(run, overrides, "")
    return predictor(rate, **more).price(variant.config, mesh)


def model_bytes(run: Path) -> int:
    (variant,) = find_variants(run, (), "")
    description = PricedRun(
        variant.config, detect_world(), CostSource(links(), "links")
    ).description(MESH)
    return sum(p.numel() * p.element_size() for p in description.model.parameters())


@pytest.mark.parametrize("kind", WITH_PRICE)
def test_every_strategy_has_a_price_that_is_not_below_its_bound(run, kind):
    single = price(run, f"strategy.kind={kind}", mesh=Mesh((1,)))
    assert single.seconds == pytest.approx(single.compute_s)
    assert single.bytes_per_link == 0
    several = price(run, f"strategy.kind={kind}")
    assert several.bytes_per_link > 0
    assert several.seconds >= several.bound_s * (1 - 1e-6)
    fast = price(run, f"strategy.kind={kind}", rate=100 * RATE)
    assert fast.seconds <= several.seconds * (1 + 1e-9)


def test_gradients_cross_a_link_twice_and_segments_once(run):
    whole = model_bytes(run)
    summed = price(run, "strategy.algorithm=ring")
    assert summed.bytes_per_link == pytest.approx(2 * 3 / 4 * whole, rel=2e-3)  # flags on top
    gossip = price(run, "strategy.kind=crossover")
    assert gossip.bytes_per_link == pytest.approx(whole)
    half = price(run, "strategy.kind=crossover", "strategy.wire=bf16")
    assert half.bytes_per_link == pytest.approx(whole / 2)
    seldom = price(run, "strategy.kind=crossover", "strategy.every=4")
    assert seldom.bytes_per_link == pytest.approx(whole / 4)
    ring = price(run, "strategy.kind=dpsgd")
    assert ring.bytes_per_link == pytest.approx(2 * whole)


def test_gossip_with_a_delay_comes_to_what_the_link_takes(run):
    slow = RATE / 20
    late = price(run, "strategy.kind=crossover", "strategy.delay=1", rate=slow)
    assert late.seconds == pytest.approx(model_bytes(run) / slow, rel=1e-3)
    at_once = price(run, "strategy.kind=crossover", rate=slow)
    assert late.seconds < at_once.seconds < late.seconds + late.compute_s


def test_segments_are_sent_during_backward_and_the_whole_model_after_it(run):
    """The whole model is sent last and due first, so all of its time is exposed."""
    whole = price(run, "strategy.kind=crossover", "strategy.segments=whole")
    expected_s = whole.compute_s + model_bytes(run) / RATE
    assert whole.seconds == pytest.approx(expected_s, rel=2e-3)
    fine = price(run, "strategy.kind=crossover", "strategy.segments=fine")
    assert fine.seconds < 0.95 * whole.seconds


def test_buckets_hide_behind_backward(run):
    overlapped = price(run, "strategy.algorithm=ring", "strategy.bucket_bytes=20KB")
    one = price(run, "strategy.algorithm=ring", "strategy.bucket_bytes=100MB")
    assert overlapped.seconds < one.seconds


def test_later_buckets_overlap_the_update_of_earlier_ones(run):
    """Memory is slow here, so an update takes long; reading all gradients prevents the overlap."""
    small, slow = ["strategy.algorithm=ring", "strategy.bucket_bytes=20KB"], "4e7,5e7"
    beside = price(run, *small, device=slow)
    read = price(run, *small, "train.clip_norm=1.0", device=slow)
    assert read.compute_s == beside.compute_s
    assert read.exposed_s > beside.exposed_s + 0.01 * beside.seconds


def test_the_cost_of_a_round_is_shared_by_its_steps(run):
    one = price(run, "strategy.kind=local_sgd", "strategy.every=1", "strategy.algorithm=ring")
    eight = price(run, "strategy.kind=local_sgd", "strategy.every=8", "strategy.algorithm=ring")
    assert eight.exposed_s == pytest.approx(one.exposed_s / 8)
    first = ["strategy.kind=post_local", "strategy.every=8", "strategy.algorithm=ring"]
    assert price(run, *first, "strategy.from_step=20").seconds == pytest.approx(eight.seconds)


def test_fragments_that_are_sent_during_steps_are_hidden(run):
    diloco = ["strategy.kind=diloco", "strategy.every=8", "strategy.fragments=2"]
    assert price(run, *diloco, rate=2 * RATE).exposed_s > 0
    assert price(run, *diloco, "strategy.delay=3", rate=2 * RATE).exposed_s == 0


def test_pairs_of_noloco_send_the_model_once_a_period(run):
    priced = price(run, "strategy.kind=noloco", "strategy.every=4")
    assert priced.exposed_s == pytest.approx(model_bytes(run) / RATE / 4, rel=1e-2)


def test_a_sharded_step_follows_the_simulation_of_its_plan(run):
    zero3 = price(run, "strategy.kind=sharded", "strategy.plan=zero3", "strategy.unit=10KB")
    zero2 = price(run, "strategy.kind=sharded", "strategy.plan=zero2", "strategy.unit=10KB")
    assert zero3.bytes_per_link == pytest.approx(1.5 * zero2.bytes_per_link, rel=0.03)
    assert zero3.seconds > zero2.seconds


def test_micro_batches_compute_as_much_and_communicate_once(run):
    whole = price(run, "strategy.algorithm=ring")
    cut = price(run, "strategy.algorithm=ring", "train.accumulation=2")
    assert cut.compute_s == pytest.approx(whole.compute_s, rel=0.1)
    assert cut.bytes_per_link == whole.bytes_per_link


def test_ranks_have_a_share_of_the_batch_or_a_given_number_of_samples(run):
    assert price(run, mesh=Mesh((1,) * 2)).compute_s > 1.5 * price(run, mesh=MESH).compute_s
    each = [price(run, mesh=Mesh((1,) * n), samples=2).compute_s for n in (2, 4)]
    assert each[0] == pytest.approx(each[1])


def test_ranks_that_share_one_machines_cores_take_turns(run):
    (variant,) = find_variants(run, (), "")
    source = CostSource(links(pool="shared"), "links", device=DEVICE)
    shared = Predictor(source, detect_world(), samples=2)
    seconds = [shared.price(variant.config, Mesh((1,) * n)).compute_s for n in (1, 2, 3, 4, 6)]
    assert [s / seconds[0] for s in seconds] == pytest.approx([1, 1, 2, 2, 3])


def test_compute_time_comes_from_a_profile(run, tmp_path, capsys):
    path = tmp_path / "profile.json"
    estimate = ["--estimate", "--cluster", "ethernet 10gbit", "--device", DEVICE]
    assert main(["profile", str(run), *estimate, "--out", str(path)]) == 0
    capsys.readouterr()
    saved = json.loads(path.read_text())
    for unit in saved["units"]:
        unit["backward_s"] *= 3
    saved["update_s"] = 0.125
    path.write_text(json.dumps(saved))
    (variant,) = find_variants(run, (), "")
    source = CostSource(links(1e12), "links", path)
    priced = Predictor(source, detect_world()).price(variant.config, MESH)
    unit_s = sum(unit["forward_s"] + unit["backward_s"] for unit in saved["units"])
    assert priced.compute_s == pytest.approx(unit_s + 0.125)
    (other,) = find_variants(run, ["model.width=64"], "")
    with pytest.raises(ConfigError, match="profile of another model"):
        Predictor(source, detect_world()).price(other.config, MESH)


def test_a_profile_of_ranks_that_shared_cores_includes_that_sharing(run, tmp_path, capsys):
    path = tmp_path / "profile.json"
    estimate = ["--estimate", "--cluster", "box 400mbit", "--device", DEVICE]  # four ranks
    assert main(["profile", str(run), *estimate, "--out", str(path)]) == 0
    capsys.readouterr()
    (variant,) = find_variants(run, (), "")
    shared = Predictor(CostSource(links(pool="shared"), "links", path), detect_world())
    seconds = [shared.price(variant.config, Mesh((1,) * n)).compute_s for n in (2, 4, 8)]
    profile = read_profile(path)
    profile_s = profile.compute_s + profile.update_s
    assert [s / profile_s for s in seconds] == pytest.approx([0.5, 1, 2])


def test_strategies_without_a_price_are_left_out_with_the_reason(run):
    specs = "allreduce:wire=topk 1%,sgp:topology=hypercube,sharded:memory=1GB,crossover"
    variants = find_variants(run, (), specs)
    rows = list(price_strategies(variants, [Mesh((1,) * 6)], predictor()))
    assert [row.price is None for row in rows] == [True, True, True, False]
    reasons = [row.left_out for row in rows]
    assert "depends on the gradients" in reasons[0]
    assert "hypercube" in reasons[1]
    assert "stretto plan" in reasons[2]


def test_a_setting_that_the_price_ignores_is_refused(run):
    class Quieter(CrossoverConfig):
        quiet: bool = False

    (variant,) = find_variants(run, (), "crossover")
    for quiet in (False, True):
        changed = variant.config.model_copy(update={"strategy": Quieter(quiet=quiet)})
        with pytest.raises(ConfigError, match="quiet") if quiet else nullcontext():
            predictor().price(changed, MESH)


def test_a_strategy_of_the_runs_own_kind_keeps_its_settings(run, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(GPT + '[strategy]\nkind = "crossover"\ndelay = 2\n')
    specs = "crossover,crossover:delay=1,sgp,allreduce"
    found = find_variants(own, ["strategy.every=3"], specs)
    assert [v.spec for v in found] == specs.split(",")
    strategies = [v.config.strategy for v in found]
    assert [(s.kind, getattr(s, "delay", None), getattr(s, "every", None)) for s in strategies] == [
        ("crossover", 2, 3),
        ("crossover", 1, 3),
        ("sgp", 0, 1),
        ("allreduce", None, None),
    ]
    assert [v.spec for v in find_variants(own, (), "")] == ["crossover"]
    assert [v.spec for v in find_variants(own, (), "all")] == list(STRATEGIES)


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ("allreduse", 'did you mean "allreduce"'),
        ("crossover:delay", "expected crossover:key=value"),
        ("crossover:delai=1", "delai"),
        ("crossover:delay=99", "delay"),
    ],
)
def test_an_impossible_strategy_is_refused(run, specs, reason):
    with pytest.raises(ConfigError, match=reason):
        find_variants(run, (), specs)

"""A plan that is made when a run starts: within its memory, on all ranks, or refused by all."""

import pytest
from torch import nn

from stretto.bench.profile_run import write_profile
from stretto.cluster.world import Mesh, World
from stretto.comm.in_process_transports import run_threads
from stretto.config import load
from stretto.errors import ConfigError
from stretto.planner.memory import Footprints
from stretto.planner.plan import MessageKind, read_plan
from stretto.planner.planner import make_plan
from stretto.planner.profile import Link, Profile, UnitCost, worthwhile_unit_bytes
from stretto.run import RunConfig, assemble, prepare
from stretto.strategies.sharded.assembly import ModelInfo
from stretto.strategies.sharded.config import ShardedConfig, checked_plan, units_of
from stretto.strategies.sharded.sharded import Sharded
from tests.unit.strategies.sharded.test_refusals import sgd, train

NEED = 180_000
"""Enough for parameters that come and go on two ranks, not for those that stay."""
LITTLE = 150_000
"""Enough on 64 ranks, each with a small chunk, and not on two."""
PLENTY = 10_000_000


def wide():
    return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 2))


def narrow():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def profile_of(model, ranks=2, unit_bytes=0):
    """Return a profile of a model's units, with a link that is slow."""
    units = units_of(ShardedConfig(unit=unit_bytes), model)
    costs = [
        UnitCost(
            name=unit.name,
            numel=unit.numel,
            forward_s=1e-3,
            backward_s=2e-3,
            activation_bytes=30_000,
            tensors=tuple(p.numel() for p in unit.parameters),
        )
        for unit in units
    ]
    link = Link(ranks=ranks, latency_s=1e-4, bytes_per_s=1e7)
    return Profile(units=tuple(costs), link=link, state_bytes=8, unit_bytes=unit_bytes)


@pytest.fixture
def saved(tmp_path):
    """Return what saves a profile, and tells where."""

    def save(profile):
        write_profile(profile, tmp_path / "profile.json")
        return str(tmp_path / "profile.json")

    return save


def planned(memory, *, ranks=2, reads=False, model_info=None, **config):
    """Return on each rank the plan that a wide model was cut up by, or the message of an error."""

    def work(transport):
        strategy = Sharded(ShardedConfig(memory=memory, **config), transport)
        strategy.reads_gradients = reads
        strategy.model_info = model_info or ModelInfo()
        try:
            model, _ = strategy.attach(wide(), sgd)
            train(strategy, model)
            plan = strategy.plan
        except ConfigError as refused:
            strategy.close()
            return str(refused)
        strategy.close()
        return plan

    return run_threads(ranks, work, timeout_s=40)


@pytest.mark.parametrize("memory", [NEED, PLENTY])
def test_all_ranks_run_one_plan_that_keeps_within_the_memory(memory, saved):
    profile = profile_of(wide())
    first, second = planned(memory, profile=saved(profile), unit=0)
    assert first == second
    assert Footprints(profile).peak(first) <= memory
    stays = all(not unit.sharding.shards_parameters for unit in first.units)
    assert stays == (memory == PLENTY)


def test_chunks_are_those_of_the_ranks_that_there_are(saved):
    profile = profile_of(wide(), ranks=64)
    assert make_plan(profile, LITTLE).peak_bytes <= LITTLE
    messages = planned(LITTLE, profile=saved(profile), unit=0)
    assert "no plan fits into 150 KB" in messages[0]


def test_too_little_memory_is_refused_on_all_ranks_in_the_same_words(saved):
    path = saved(profile_of(wide()))
    messages = planned(10_000, ranks=3, profile=path, unit=0)
    assert len(set(messages)) == 1
    assert messages[0].startswith("no plan fits into 10 KB: the smallest needs ")
    assert "activations" in messages[0]
    assert "\n" not in messages[0]


def test_a_profile_of_another_model_is_refused_on_all_ranks(saved):
    path = saved(profile_of(narrow()))
    messages = planned(PLENTY, profile=path, unit=0)
    assert len(set(messages)) == 1
    assert (
        "profile.json is a profile of another model: its unit 0 is 0 of 40 elements" in messages[0]
    )


def test_nothing_known_of_the_model_is_refused_with_what_to_set():
    messages = planned(PLENTY, cluster="box 400mbit")
    assert len(set(messages)) == 1
    assert "set strategy.profile" in messages[0]


@pytest.mark.parametrize("reads", [False, True])
def test_whoever_reads_gradients_gets_a_plan_with_a_barrier(reads, saved):
    plan, _ = planned(NEED, profile=saved(profile_of(wide())), unit=0, reads=reads)
    assert plan.barrier is reads
    in_time = [message.due <= plan.slots.update for message in plan.messages_of(MessageKind.REDUCE)]
    assert all(in_time) == reads
    assert Footprints(profile_of(wide())).peak(plan) <= NEED


def test_an_estimate_counts_as_much_as_a_file_and_rank_0_has_the_say():
    def work(transport):
        strategy = Sharded(ShardedConfig(memory=NEED, cluster="box 400mbit", unit=0), transport)
        strategy.model_info = ModelInfo(profile=None if transport.rank else profile_of(wide()))
        strategy.attach(wide(), sgd)
        strategy.close()
        return strategy.plan

    first, second = run_threads(2, work, timeout_s=40)
    assert first == second
    assert [unit.name for unit in first.units] == ["0", "1", "2", "3"]


def test_units_are_joined_as_in_the_profile_and_the_plan_remembers_it(saved):
    profile = profile_of(wide(), unit_bytes=20_000)
    plan, _ = planned(PLENTY, profile=saved(profile))
    assert [unit.name for unit in plan.units] == [unit.name for unit in profile.units]
    assert len(plan.units) < 4
    assert plan.unit_bytes == 20_000


RUN = [
    "data.samples=50",
    "data.test_samples=8",
    "data.size=8",
    "model.width=8",
    "train.batch=12",
    "optim.lr=0.01",
    "strategy.kind=sharded",
]


def assembled(folder, *settings, ranks=2):
    """Put a run together on each rank; return its strategies."""

    def work(transport):
        loaded = load(RunConfig, None, [*RUN, f"run.folder={folder}", *settings])
        world = World(transport.rank, Mesh((1,) * transport.size))
        parts = assemble(loaded, prepare(loaded.config), world, transport, lambda event: None)
        parts.strategy.close()
        return parts.strategy

    return run_threads(Mesh((1,) * ranks), work, timeout_s=40)


BOX = ["strategy.cluster=box 400mbit", "strategy.memory=1MB"]


def test_a_run_without_a_profile_is_estimated_for_its_own_ranks_and_samples(tmp_path):
    two = assembled(tmp_path, *BOX, "strategy.unit=1KB")[0].model_info.profile
    (one,) = assembled(tmp_path, *BOX, "strategy.unit=1KB", ranks=1)
    assert (two.link.ranks, one.model_info.profile.link.ranks) == (2, 1)
    kept, one_rank_bytes = (
        sum(unit.activation_bytes for unit in profile.units)
        for profile in (two, one.model_info.profile)
    )
    assert one_rank_bytes == pytest.approx(2 * kept, rel=0.02)
    assert two.source == "estimated at the rates of cpu, link of box 400mbit"


def test_a_micro_batch_is_what_an_estimate_is_for(tmp_path):
    pieces = ["strategy.unit=1KB", "train.micro_batch=3"]
    (one,) = assembled(tmp_path, *BOX, *pieces, ranks=1)
    (whole,) = assembled(tmp_path, *BOX, "strategy.unit=1KB", ranks=1)
    kept, all_kept = (
        sum(unit.activation_bytes for unit in strategy.model_info.profile.units)
        for strategy in (one, whole)
    )
    assert all_kept == pytest.approx(4 * kept, rel=0.05)


def test_estimated_units_are_joined_as_far_as_the_link_is_worth_it(tmp_path):
    slow = tmp_path / "slow.toml"
    slow.write_text(
        'ranks_per_host = "2x1"\n[between]\nlatency_s = 1e-3\nbytes_per_s = 1e9\n'
        "[inside]\nlatency_s = 0\nbytes_per_s = 1e9\n"
    )
    settings = [f"strategy.cluster={slow}", "strategy.memory=100MB", "model.width=96"]
    first, second = assembled(tmp_path, *settings)
    assert first.plan == second.plan
    assert first.plan.unit_bytes == worthwhile_unit_bytes(first.model_info.profile.link) > 2_000_000
    assert len(first.plan.units) < len(usual(*settings).units), "messages that begin late are fewer"


def usual(*settings):
    loaded = load(RunConfig, None, [*RUN, *settings])
    prepared = prepare(loaded.config)
    return checked_plan(ShardedConfig(), prepared.model, prepared.calls)


def test_a_plan_of_a_run_that_clips_waits_for_all_gradients(tmp_path):
    first, _ = assembled(tmp_path, *BOX, "strategy.unit=1KB", "train.clip_norm=1.0")
    assert first.plan.barrier


@pytest.mark.parametrize("settings", [["strategy.plan=zero3"], [*BOX]])
def test_a_run_keeps_its_plan_and_the_file_repeats_it(settings, tmp_path):
    unit = "strategy.unit=1KB"
    first, _ = assembled(tmp_path, *settings, unit)
    kept = read_plan(tmp_path / "run" / "plan.json")
    assert kept.messages == first.plan.messages
    assert kept.unit_bytes == 1000
    path = tmp_path / "run" / "plan.json"
    again, _ = assembled(tmp_path, f"strategy.plan={path}", "run.name=again")
    assert again.plan == kept
    assert len(kept.units) > 1

"""The strategy that "auto" takes: the exact one with the least predicted step that fits."""

from dataclasses import replace

import pytest

from stretto.cli.main import main
from stretto.cluster.detect import detect_world
from stretto.cluster.world import Mesh
from stretto.config import load
from stretto.errors import ConfigError
from stretto.planner.profile import load_cluster_or_preset
from stretto.run import RunConfig
from stretto.strategies import AllReduceConfig, ShardedConfig, build_strategy
from stretto.studies.auto_choice import choose_strategy
from stretto.studies.priced_run import CostSource, parse_strategy_spec
from stretto.studies.strategy_prices import Predictor

CLUSTER = "ethernet 10gbit"
SLOW = "4e9,1e12"
"""A device so slow that a step takes about as long as its messages; updates take no time."""


def run(*more, batch=32):
    model = ["model.kind=gpt", "model.blocks=3", "model.width=128", "model.heads=4"]
    data = ["model.context=32", "model.vocab=256"]
    auto = ["strategy.kind=auto", f'strategy.cluster="{CLUSTER}"', f'strategy.device="{SLOW}"']
    return load(RunConfig, None, [*model, *data, f"train.batch={batch}", *auto, *more]).config


def world(*hosts):
    return replace(detect_world(), mesh=Mesh(hosts))


def predicted(config, where, strategy):
    source = CostSource(load_cluster_or_preset(CLUSTER), CLUSTER, device=SLOW)
    changed = config.model_copy(update={"strategy": strategy})
    return Predictor(source, detect_world()).price(changed, where.mesh).seconds


@pytest.mark.parametrize("hosts", [(1,) * 4, (2, 2), (1,) * 8, (4, 4)])
def test_no_preset_is_predicted_to_be_faster_than_the_choice(hosts):
    config, where = run(), world(*hosts)
    choice = choose_strategy(config, where)
    best_s = predicted(config, where, choice.strategy)
    others = [ShardedConfig(plan=plan) for plan in ("ddp", "zero1", "zero2", "zero3", "dear")]
    others.append(AllReduceConfig(algorithm="ring"))
    assert best_s <= 1.02 * min(predicted(config, where, other) for other in others)


def test_the_reason_names_the_choice_its_step_and_the_runner_up():
    reason = choose_strategy(run(), world(1, 1, 1, 1)).reason
    assert reason.startswith("auto takes ")
    assert "is predicted on ethernet 10gbit" in reason
    assert "; next: " in reason


def test_one_rank_takes_what_needs_no_message():
    assert isinstance(choose_strategy(run(), world(1)).strategy, AllReduceConfig)


def test_less_memory_takes_a_strategy_that_fits_and_no_memory_is_refused():
    where = world(1, 1, 1, 1)
    plenty = choose_strategy(run("strategy.memory=8GB"), where)
    assert "of 8 GB a rank" in plenty.reason
    with pytest.raises(ConfigError, match=r"no exact strategy fits: the least is \d") as refused:
        choose_strategy(run("strategy.memory=1MB"), where)
    least = str(refused.value).partition("the least is ")[2].partition(";")[0]
    tight = choose_strategy(run(f"strategy.memory={least.replace(' ', '')}", batch=32), where)
    assert isinstance(tight.strategy, ShardedConfig)


def test_a_profile_gives_the_times_and_its_units(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        '[model]\nkind = "gpt"\nblocks = 3\nwidth = 128\nheads = 4\ncontext = 32\nvocab = 256\n'
        '[strategy]\nkind = "sharded"\nunit = "200KB"\n[train]\nbatch = 32\n'
    )
    estimate = ["--estimate", "--cluster", CLUSTER, "--device", SLOW]
    assert main(["profile", "run.toml", *estimate, "--out", "profile.json"]) == 0
    profiled = ["strategy.device=", "strategy.profile=profile.json"]
    choice = choose_strategy(run(*profiled), world(1, 1, 1, 1))
    assert "zero2" in choice.reason
    assert "not priced" not in choice.reason
    with pytest.raises(ConfigError, match=r"no strategy could be priced: .* another model"):
        choose_strategy(run(*profiled, "model.width=64"), world(1, 1))


def test_auto_needs_a_description_of_the_links():
    with pytest.raises(ConfigError, match="set cluster to a file of stretto calibrate"):
        load(RunConfig, None, ["strategy.kind=auto"])
    with pytest.raises(ConfigError, match="nowhere"):
        choose_strategy(run('strategy.cluster="nowhere"'), world(1, 1))


def test_a_device_beside_a_profile_is_refused():
    with pytest.raises(ConfigError, match=r"device would be ignored: p\.json has the compute"):
        run("strategy.profile=p.json")


def test_only_stretto_train_chooses():
    with pytest.raises(ConfigError, match="only stretto train chooses"):
        build_strategy(run().strategy, None)
    with pytest.raises(ConfigError, match="is chosen by `stretto train`"):
        parse_strategy_spec("auto")

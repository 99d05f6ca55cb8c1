"""Recipes are complete and valid, and run files and overrides change their settings.

tests/golden/recipes.txt holds the derived settings of published recipes. After an intended change,
rewrite it with ``python -m tests.golden.recipes``.
"""

from pathlib import Path

import pytest

from stretto.cli.main import main
from stretto.cli.recipe import recipe as recipe_command
from stretto.config import load, to_toml
from stretto.errors import ConfigError
from stretto.recipes import RECIPES as PUBLISHED
from stretto.recipes import find_recipe, load_run
from stretto.recipes.recipe import describe_recipe, refusal_reason
from stretto.recipes.small_runs import demo, gpt_25mb
from stretto.run import RunConfig, derive_rates, flat_settings, prepare
from tests.golden.recipes import GOLDEN, SHOWN

RECIPES = {"demo": demo(), "gpt_25mb": gpt_25mb(4)} | {
    name: make().tables for name, make in PUBLISHED.items()
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_valid_run_that_its_toml_gives_back(name, tmp_path):
    loaded = load(RunConfig, None, recipe=RECIPES[name])
    path = tmp_path / "run.toml"
    path.write_text(to_toml(loaded))
    assert load(RunConfig, path).config == loaded.config


def test_the_demo_can_be_prepared():
    prepare(load(RunConfig, None, recipe=demo()).config)


def test_files_and_overrides_change_a_recipe(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[model]\nwidth = 8\n[train]\nepochs = 2\n")
    loaded = load(RunConfig, path, ["train.batch=32"], recipe=demo())
    assert (loaded.config.model.width, loaded.config.model.norm) == (8, "group")
    assert loaded.source["model.norm"] == "recipe"
    assert loaded.source["model.width"] == "mine.toml"
    assert loaded.source["train.batch"] == "override"
    assert loaded.source["train.log_every"] == "default"


def test_another_kind_in_the_file_drops_the_keys_of_the_recipe(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[model]\nkind = "resnet"\n')
    assert load(RunConfig, path, recipe=demo()).config.model.kind == "resnet"


@pytest.mark.parametrize("case", SHOWN)
def test_derived_settings_are_those_of_the_sources(case, capsys):
    assert main(["recipe", *SHOWN[case]]) == 0
    held = GOLDEN.read_text().split("\n\n")[list(SHOWN).index(case)]
    assert capsys.readouterr().out.strip() == held.strip()


@pytest.mark.parametrize("name", PUBLISHED)
def test_only_batch_lines_depend_on_the_number_of_workers(name):
    recipe, loaded = find_recipe(name), load_run(Path(name))
    few, many = (describe_recipe(recipe, loaded, recipe.samples, workers) for workers in (1, 2048))
    differing = {a.name for a, b in zip(few, many, strict=True) if a != b}
    assert differing <= {"batch", "batch norm"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_line_that_matters_names_its_source(name):
    recipe = find_recipe(name)
    lines = describe_recipe(recipe, load_run(Path(name)), recipe.samples, 8)
    unsourced = {line.name for line in lines if not line.source}
    assert unsourced <= {"batch norm", "label smoothing", "precision", "last gamma"}


def test_an_unset_key_no_longer_has_the_source_of_the_recipe():
    settings = ["optim.warmup_from=", "optim.lr=", "train.steps=3"]
    recipe, loaded = find_recipe("resnet50_74s"), load_run(Path("resnet50_74s"), settings)
    lines = {line.name: line for line in describe_recipe(recipe, loaded, recipe.samples, 8)}
    assert loaded.config.optim.warmup_from is None
    assert lines["warm-up"].source.endswith("; warmup_from reset to its default")
    assert lines["lr"].source == "reset to its default"
    assert lines["length"].rule.startswith("the run ends in the warm-up of 540 steps")
    assert lines["length"].source == ""


def test_the_1_hour_recipe_has_the_rates_of_goyal():
    config = load_run(Path("resnet50_1hour")).config
    derived = derive_rates(config, 1_281_167)
    epoch = 157
    assert derived.epoch_steps == epoch
    assert derived.rate_at(0) == pytest.approx(0.1)
    assert derived.rate_at(5 * epoch) == pytest.approx(3.2)
    for first, rate in ((5, 3.2), (30, 0.32), (60, 0.032), (80, 0.0032)):
        assert derived.rate_at(first * epoch) == pytest.approx(rate)


def test_the_74_s_recipe_has_the_rates_of_fujitsu_at_every_step():
    config = load_run(Path("resnet50_74s")).config
    derived = derive_rates(config, 1_281_167)
    for step in range(90 * 15):
        if step < 540:
            share = step / 540
        else:
            share = (1 - 0.0025) * (1 - min(step - 540, 780) / 780) ** 2.2 + 0.0025
        assert derived.rate_at(step) == pytest.approx(13 * share, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "peak"), [("allreduce_86k", 9), ("sgp_86k", 9), ("crossover_86k", 11)]
)
def test_the_comparison_at_86k_has_the_published_rates(name, peak):
    derived = derive_rates(load_run(Path(name)).config, 1_281_167)
    for step in range(90 * 15):
        if step < 540:
            share = (step + 1) / 540
        else:
            share = (1 - 0.0025) * (1 - min(step - 540, 780) / 780) ** 2.2 + 0.0025
        assert derived.rate_at(step) == pytest.approx(peak * share, rel=1e-12)


def test_the_recipes_at_86k_differ_in_the_compared_settings_only():
    def settings(name):
        return flat_settings(load_run(Path(name)).config)

    def differing(one, other):
        mine, theirs = settings(one), settings(other)
        shared = mine.keys() & theirs.keys()
        return {key for key in shared if mine[key] != theirs[key]} - {"recipe", "run.name"}

    assert differing("allreduce_86k", "sgp_86k") == {"strategy.kind"}
    assert differing("allreduce_86k", "crossover_86k") == {"strategy.kind", "optim.lr"}
    for groups in (4, 8, 16):
        name = f"crossover_86k_groups{groups}"
        assert differing("crossover_86k", name) == {"strategy.groups"}
        assert settings(name)["strategy.groups"] == groups


@pytest.mark.parametrize(
    ("name", "workers", "reason"),
    [
        ("crossover_86k", 1, None),
        ("crossover_86k_groups8", 4, "8: 4 ranks can be 1, 2 or 4 groups of equal size, not 8"),
        ("crossover_86k_groups8", 8, None),
        ("crossover_86k_groups8", 64, None),
        ("resnet50_74s", 1, None),
    ],
)
def test_a_number_of_workers_that_cannot_form_the_groups_is_reported(name, workers, reason, capsys):
    whole = None if reason is None else f"strategy.groups = {reason}"
    assert refusal_reason(load_run(Path(name)).config, workers) == whole
    assert recipe_command(name, workers=workers) == 0
    said = capsys.readouterr().err
    assert said == (f"stretto: --workers {workers} cannot train it: {whole}\n" if whole else "")


def test_a_strategy_that_overrides_a_recipe_is_listed():
    recipe = find_recipe("resnet50_74s")
    loaded = load_run(Path("resnet50_74s"), ["strategy.kind=crossover"])
    lines = {line.name: line for line in describe_recipe(recipe, loaded, recipe.samples, 8)}
    assert (lines["strategy"].value, lines["strategy"].source) == (
        "crossover",
        "set by an override",
    )


def test_for_batch_keeps_the_rate_of_the_full_batch():
    settings = ["train.batch=8", "optim.for_batch=8192"]
    config = load_run(Path("resnet50_1hour"), settings).config
    assert derive_rates(config, 1000).lr == pytest.approx(3.2)


def test_a_data_folder_may_have_the_name_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar10").mkdir()
    assert load_run(Path("cifar10"), ["train.epochs=2"]).config.train.epochs == 2


def test_a_run_file_may_be_based_on_a_recipe(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "cifar10"\n[train]\nepochs = 3\n')
    loaded = load_run(path, ["train.batch=256"])
    assert (loaded.config.train.epochs, loaded.config.model.depth) == (3, 18)
    assert derive_rates(loaded.config, 50_000).lr == pytest.approx(0.2)
    path.write_text(to_toml(loaded))
    assert load_run(path).config == loaded.config


@pytest.mark.parametrize("text", ['recipe = "cifar"\n', "recipe = 3\n"])
def test_a_recipe_that_does_not_exist_is_named(text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="recipe"):
        load_run(path)


def test_a_recipe_can_be_written_to_a_new_file_only(tmp_path, capsys):
    path = tmp_path / "run.toml"
    assert main(["recipe", "cifar10", "train.batch=64", "--out", str(path)]) == 0
    assert load_run(path).config.train.batch == 64
    assert main(["recipe", "cifar10", "--out", str(path)]) == 2
    assert "already" in capsys.readouterr().err

"""Ready-made runs are complete and valid, and give way to files and overrides."""

import pytest

from stretto.config import load, to_toml
from stretto.recipes.benchmarks import gpt_25mb
from stretto.recipes.demo import demo
from stretto.run import RunConfig, prepare

RECIPES = {"demo": demo(), "gpt_25mb": gpt_25mb(4)}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_valid_run_that_its_own_text_gives_back(name, tmp_path):
    loaded = load(RunConfig, None, recipe=RECIPES[name])
    path = tmp_path / "run.toml"
    path.write_text(to_toml(loaded))
    assert load(RunConfig, path).config == loaded.config


def test_the_demo_can_learn_its_data():
    prepare(load(RunConfig, None, recipe=demo()).config)


def test_files_and_overrides_are_laid_over_a_recipe(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[model]\nwidth = 8\n[train]\nepochs = 2\n")
    loaded = load(RunConfig, path, ["train.batch=32"], recipe=demo())
    assert (loaded.config.model.width, loaded.config.model.norm) == (8, "group")
    assert loaded.origin["model.norm"] == "recipe"
    assert loaded.origin["model.width"] == "mine.toml"
    assert loaded.origin["train.batch"] == "override"
    assert loaded.origin["train.log_every"] == "default"


def test_another_kind_in_the_file_drops_the_keys_of_the_recipe(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[model]\nkind = "resnet"\n')
    assert load(RunConfig, path, recipe=demo()).config.model.kind == "resnet"

"""Recipes: complete runs by name, published ones with the source of every setting."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stretto.config import LoadedConfig, load
from stretto.config.formatting import did_you_mean
from stretto.config.load import read_run_file
from stretto.errors import ConfigError
from stretto.recipes.imagenet import (
    alexnet_4min,
    allreduce_86k,
    crossover_86k,
    crossover_86k_groups4,
    crossover_86k_groups8,
    crossover_86k_groups16,
    resnet50_1hour,
    resnet50_4min,
    resnet50_74s,
    sgp_86k,
)
from stretto.recipes.recipe import Recipe
from stretto.recipes.small_runs import cifar10
from stretto.run import RunConfig

RECIPES: Mapping[str, Callable[[], Recipe]] = {
    make.__name__: make
    for make in (
        *(resnet50_1hour, resnet50_74s, resnet50_4min, alexnet_4min),
        *(allreduce_86k, sgp_86k, crossover_86k),
        *(crossover_86k_groups4, crossover_86k_groups8, crossover_86k_groups16),
        cifar10,
    )
}
"""Recipes by name; a recipe may be derived from an earlier one."""


def find_recipe(name: str) -> Recipe:
    """Return the recipe ``name``; raise `ConfigError` with the most similar name if unknown."""
    if name not in RECIPES:
        raise ConfigError(
            f"no recipe is called {name!r}{did_you_mean(name, list(RECIPES))}; there are "
            f"{', '.join(RECIPES)}"
        )
    return RECIPES[name]()


def load_run(run: Path, overrides: Sequence[str] = ()) -> LoadedConfig[RunConfig]:
    """Load a run file on top of the recipe that it names, or load a recipe by its name.

    Raises:
        ConfigError: The run is invalid, or there is neither a run file nor a recipe ``run``.
    """
    if any(override.partition("=")[0].strip() == "recipe" for override in overrides):
        raise ConfigError(
            "override recipe=...: a recipe lies below the run file, so no override sets it: begin "
            'the file with recipe = "NAME", or give the name in place of the file'
        )
    if not run.suffix and not run.exists() and str(run) not in RECIPES:
        raise ConfigError(
            f"there is neither a run file nor a recipe {str(run)!r}"
            f"{did_you_mean(str(run), list(RECIPES))}; stretto recipe lists the recipes"
        )
    if str(run) in RECIPES and not run.is_file():  # a folder of that name may hold the data
        return load(RunConfig, None, overrides, recipe=_tables(str(run)))
    name = read_run_file(run).get("recipe")
    return load(RunConfig, run, overrides, recipe=_tables(name) if isinstance(name, str) else None)


def _tables(name: str) -> dict[str, object]:
    return {"recipe": name, "run": {"name": name}, **find_recipe(name).tables}


__all__ = ["RECIPES", "Recipe", "find_recipe", "load_run"]

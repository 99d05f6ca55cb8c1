"""Complete runs, ready made: published ones with their sources, and those we show and time."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stretto.config import Loaded, load
from stretto.config.read import read_file
from stretto.config.text import nearest
from stretto.errors import ConfigError
from stretto.recipes.cifar import cifar10
from stretto.recipes.crossover import (
    allreduce_86k,
    crossover_86k,
    crossover_86k_groups4,
    crossover_86k_groups8,
    crossover_86k_groups16,
    sgp_86k,
)
from stretto.recipes.imagenet import (
    alexnet_4min,
    resnet50_1hour,
    resnet50_4min,
    resnet50_74s,
)
from stretto.recipes.recipe import Recipe
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
"""The published ones, each derived from one before it or from nothing."""


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name; raise `ConfigError` with the nearest one where none is."""
    if name not in RECIPES:
        raise ConfigError(
            f"no recipe is called {name!r}{nearest(name, list(RECIPES))}; there are "
            f"{', '.join(RECIPES)}"
        )
    return RECIPES[name]()


def load_run(run: Path, overrides: Sequence[str] = ()) -> Loaded[RunConfig]:
    """Load a run file, laid over the recipe it names; or a recipe itself, given by its name.

    Raises:
        ConfigError: Listing what is wrong with it, or that there is neither such a file nor recipe.
    """
    if any(override.partition("=")[0].strip() == "recipe" for override in overrides):
        raise ConfigError(
            "override recipe=...: a recipe lies below the run file, not over it: begin the file "
            'with recipe = "NAME", or give the name in place of the file'
        )
    if not run.suffix and not run.exists() and str(run) not in RECIPES:
        raise ConfigError(
            f"there is neither a run file nor a recipe {str(run)!r}"
            f"{nearest(str(run), list(RECIPES))}; stretto recipe lists the recipes"
        )
    if str(run) in RECIPES and not run.is_file():  # a folder of that name may hold its data
        return load(RunConfig, None, overrides, recipe=_tables(str(run)))
    name = read_file(run).get("recipe")
    return load(RunConfig, run, overrides, recipe=_tables(name) if isinstance(name, str) else None)


def _tables(name: str) -> dict[str, object]:
    return {"recipe": name, "run": {"name": name}, **find_recipe(name).tables}


__all__ = ["RECIPES", "Recipe", "find_recipe", "load_run"]

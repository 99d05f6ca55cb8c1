"""``stretto recipe``: published runs, their hyper-parameters, and the source of each."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.config import LoadedConfig
    from stretto.recipes.recipe import RecipeLine
    from stretto.run import RunConfig


def recipe(
    name: str | None = None,
    /,
    *overrides: str,
    workers: int = 8,
    images: int | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """List the recipes; or derive one's hyper-parameters, with rule and source; or write it out.

    Parameters
    ----------
    name
        The recipe; all are listed when left out.
    overrides
        Settings that override it, as table.key=value; train.batch=81920 derives another rate.
    workers
        Number of workers that share the batch; no hyper-parameter depends on it.
    images
        Number of training samples; by default that of the recipe's dataset.
    out
        Write the recipe to this run file, to be edited and trained.
    json
        Print one object a line.
    """
    from stretto.errors import ConfigError
    from stretto.recipes import RECIPES, find_recipe, load_run
    from stretto.recipes.recipe import describe_recipe, refusal_reason

    if name is None:
        width = max(map(len, RECIPES)) + 2
        for make in RECIPES.values():
            listed_recipe = make()
            print(f"{listed_recipe.name:{width}}{listed_recipe.title}")
        return 0
    for flag, number in (("--workers", workers), ("--images", images)):
        if number is not None and number < 1:
            raise ConfigError(f"{flag} {number}: expected at least 1")
    found = find_recipe(name)
    loaded = load_run(Path(name), overrides)
    if out is not None:
        return _write(loaded, out)
    lines = describe_recipe(found, loaded, images or found.samples, workers)
    if reason := refusal_reason(loaded.config, workers):
        print(f"stretto: --workers {workers} cannot train it: {reason}", file=sys.stderr)
    if json:
        _print_json(lines)
        return 0
    print(f"{found.name}: {found.title}")
    if found.based_on:
        print(f"derived from {found.based_on}")
    _print_table(lines)
    return 0


def _write(loaded: "LoadedConfig[RunConfig]", out: Path) -> int:
    from stretto.config import set_derived_values, to_toml
    from stretto.errors import ConfigError

    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if out.exists():
        raise ConfigError(f"--out {out}: there is such a file already; name another")
    # Without the recipe's name, a line that the user deletes does not fall back to the recipe.
    out.write_text(to_toml(set_derived_values(loaded, {"recipe": None})), encoding="utf-8")
    print(f"wrote {out}: set data.path in it, then `stretto train {out}`")
    return 0


def _print_json(lines: "list[RecipeLine]") -> None:
    for line in lines:
        print(json.dumps(asdict(line)))


def _print_table(lines: "list[RecipeLine]") -> None:
    """Print the lines as a table with numbered sources, and the sources below."""
    sources = list(dict.fromkeys(line.source for line in lines if line.source))
    name = max(len(line.name) for line in lines) + 2
    value = max(len(line.value) for line in lines) + 2
    for line in lines:
        number = f" [{sources.index(line.source) + 1}]" if line.source else ""
        print(f"  {line.name:{name}}{line.value:{value}}{line.rule}{number}")
    for index, source in enumerate(sources, 1):
        print(f"[{index}] {source}")

"""``stretto recipe``: published runs, their hyper-parameters, and where each comes from."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.config import Loaded
    from stretto.recipes.telling import Told
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
        Settings laid over it, as table.key=value: train.batch=81920 derives another rate.
    workers
        Over how many workers the batch is shared; no hyper-parameter depends on it.
    images
        Training samples; those of the data it was made for when left out.
    out
        Write it as a run file here, to be edited and trained.
    json
        One object a line.
    """
    from stretto.errors import ConfigError
    from stretto.recipes import RECIPES, find_recipe, load_run
    from stretto.recipes.telling import refused, tell

    if name is None:
        width = max(map(len, RECIPES)) + 2
        for make in RECIPES.values():
            known = make()
            print(f"{known.name:{width}}{known.title}")
        return 0
    for flag, number in (("--workers", workers), ("--images", images)):
        if number is not None and number < 1:
            raise ConfigError(f"{flag} {number}: expected at least 1")
    found = find_recipe(name)
    loaded = load_run(Path(name), overrides)
    if out is not None:
        return _write(loaded, out)
    told = tell(found, loaded, images or found.samples, workers)
    if reason := refused(loaded.config, workers):
        print(f"stretto: --workers {workers} cannot train it: {reason}", file=sys.stderr)
    if json:
        _print_json(told)
        return 0
    print(f"{found.name}: {found.title}")
    if found.based_on:
        print(f"derived from {found.based_on}")
    _print_table(told)
    return 0


def _write(loaded: "Loaded[RunConfig]", out: Path) -> int:
    from stretto.config import resolve, to_toml
    from stretto.errors import ConfigError

    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if out.exists():
        raise ConfigError(f"--out {out}: there is such a file already; name another")
    # Without the recipe's name: a line that is deleted in the file must not show through again.
    out.write_text(to_toml(resolve(loaded, {"recipe": None})), encoding="utf-8")
    print(f"wrote {out}: set data.path in it, then `stretto train {out}`")
    return 0


def _print_json(told: "list[Told]") -> None:
    for line in told:
        print(json.dumps(asdict(line)))


def _print_table(told: "list[Told]") -> None:
    """Print a line for each, and below them the sources they name by number."""
    sources = list(dict.fromkeys(line.source for line in told if line.source))
    name = max(len(line.name) for line in told) + 2
    value = max(len(line.value) for line in told) + 2
    for line in told:
        number = f" [{sources.index(line.source) + 1}]" if line.source else ""
        print(f"  {line.name:{name}}{line.value:{value}}{line.rule}{number}")
    for place, source in enumerate(sources, 1):
        print(f"[{place}] {source}")

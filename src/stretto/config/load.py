"""From a TOML run file and ``table.key=value`` overrides to a checked config with origins."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from stretto.config.explain import TOO_DEEP, explain
from stretto.config.read import TAKEN_BACK, parse_key, parse_overrides, read_file
from stretto.config.shape import Config, takes
from stretto.config.text import dotted, printable
from stretto.config.tree import (
    DEFAULT,
    OVERRIDE,
    RECIPE,
    Table,
    Tree,
    complete,
    layer_table,
    leaves,
    mark,
    mark_table,
    nest,
    plain,
    take_back,
    with_origins,
    without,
)
from stretto.errors import ConfigError

C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A config, and for every leaf of it (by dotted key) who set it."""

    config: C
    origin: Mapping[str, str]
    """``"default"``, ``"recipe"``, the run file's name, ``"override"``, or a note to `resolve`."""


def load(
    model: type[C],
    file: Path | None,
    overrides: Sequence[str] = (),
    recipe: Mapping[str, object] | None = None,
) -> Loaded[C]:
    """Lay ``file`` over ``recipe`` and ``overrides`` over both; check the whole against ``model``.

    Overrides of a ``kind`` go first, whatever their order: a table whose kind an override
    changes starts anew, without what the file said for the other kind. One without a value
    (``table.key=``) takes a key back: neither file nor recipe nor an override before it has set it.

    Raises:
        ConfigError: listing every problem found.
    """
    source = printable(file.name) if file else "no run file"
    try:
        table = complete(model, mark_table(recipe or {}, RECIPE))
        said = mark_table(read_file(file), source) if file else {}
        table = complete(model, layer_table(table, said))
        table, taken_back = _lay_over(model, table, overrides)
        return _checked(model, table, source, taken_back)
    except RecursionError:
        raise ConfigError(f"{source}: {TOO_DEEP}") from None


def resolve(loaded: Loaded[C], derived: Mapping[str, object], note: str = "derived") -> Loaded[C]:
    """Return a copy in which the dotted keys of ``derived`` are set, with origin ``note``.

    Values may be anything a config holds, tuples, paths and configs included; tables are merged
    key by key. The result is checked like a file.
    """
    table = tree_of(loaded)
    for key, value in derived.items():
        content = to_jsonable_python(value)
        table = layer_table(table, nest(parse_key(key), mark(content, note)))
    return _checked(type(loaded.config), table, note)


def tree_of(loaded: Loaded[C]) -> Table:
    """Return the whole config as a tree whose leaves bear their origins."""
    return with_origins(_dumped(loaded.config), loaded.origin)


def _lay_over(
    model: type[C], table: Table, overrides: Sequence[str]
) -> tuple[Table, list[tuple[str, ...]]]:
    """Return ``table`` with ``overrides`` laid over it, and the keys that they take back."""
    above: list[tuple[tuple[str, ...], Tree]] = []
    taken_back: list[tuple[str, ...]] = []
    for path, content in parse_overrides(overrides):
        if content is TAKEN_BACK:
            table = take_back(model, table, path)
            above = [(at, without(tree, path)) for at, tree in above]
            taken_back.append(path)
        else:
            above.append((path, nest(path, mark(content, OVERRIDE))))
    for _, tree in sorted(above, key=_kinds_first):
        if any(leaves(tree)):
            table = layer_table(table, tree)
    for path in taken_back:
        around = complete(model, layer_table(table, nest(path[:-1], {})))
        if not takes(model, plain(around), path):  # for the validator to find, and us to explain
            table = layer_table(table, nest(path, mark("", OVERRIDE)))
    return table, taken_back


def _kinds_first(override: tuple[tuple[str, ...], object]) -> tuple[bool, int]:
    path, _ = override
    return (path[-1] != "kind", len(path) if path[-1] == "kind" else 0)


def _checked(
    model: type[C],
    table: Table,
    source: str,
    taken_back: Collection[tuple[str, ...]] = (),
) -> Loaded[C]:
    table = complete(model, table)
    # As JSON, because only there strict validation lets a list be a tuple and text be a path.
    text = json.dumps(plain(table), default=_date_as_text)
    try:
        config = model.model_validate_json(text)
    except ValidationError as wrong:
        errors = wrong.errors(include_url=False, include_input=False)
        raise ConfigError(explain(model, table, errors, source, taken_back)) from None
    given = {path: leaf.origin for path, leaf in leaves(table)}
    paths = (path for path, _ in leaves(_dumped(config)))
    return Loaded(config, {dotted(path): _origin(given, path) for path in paths})


def _dumped(config: Config) -> Table:
    return mark_table(config.model_dump(mode="json"), DEFAULT)


def _origin(given: Mapping[tuple[str, ...], str], path: tuple[str, ...]) -> str:
    """Return who set ``path``, or the value it was made of (a validator may unfold a text)."""
    prefixes = (path[:end] for end in range(len(path), 0, -1))
    return next((given[prefix] for prefix in prefixes if prefix in given), DEFAULT)


def _date_as_text(value: object) -> str:
    assert isinstance(value, date | time), f"TOML has no {type(value).__name__}"
    return value.isoformat()

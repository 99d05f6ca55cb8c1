"""Load a config from a TOML run file and ``table.key=value`` overrides, and write it back.

Every value of a loaded config has a source: the default, the recipe, the run file or an override.
"""

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from stretto.config.formatting import (
    did_you_mean,
    dotted_key,
    escape_unprintable,
    join_problems,
    toml_key,
    toml_value,
)
from stretto.config.schema import Config, accepts_key
from stretto.config.tree import (
    SOURCE_DEFAULT,
    SOURCE_OVERRIDE,
    SOURCE_RECIPE,
    SettingsTable,
    SettingsTree,
    SettingValue,
    build_table,
    build_tree,
    fill_inherited_defaults,
    iter_leaves,
    merge_tables,
    nest_under,
    remove_key,
    strip_sources,
    unset_key,
    with_sources,
)
from stretto.config.validation_errors import NESTED_TOO_DEEPLY, format_validation_errors
from stretto.errors import ConfigError
from stretto.renamed import with_new_keys, with_new_path

UNSET_OVERRIDE = object()
"""The content of an override without a value (``table.key=``), which unsets the key."""


def read_run_file(file: Path) -> dict[str, object]:
    """Return the tables of ``file``, not validated.

    Raises:
        ConfigError: The file does not exist, cannot be read, or is not TOML.
    """
    name = escape_unprintable(str(file))
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise ConfigError(
            f"{name}: not UTF-8 text: byte {wrong.start} cannot be read; save the file as UTF-8"
        ) from None
    except (OSError, ValueError) as wrong:
        raise ConfigError(_unreadable_file_message(file, wrong)) from None
    try:
        return tomllib.loads(text)
    except ValueError as wrong:
        raise ConfigError(f"{name}: not TOML: {_with_line_number(str(wrong), text)}") from None


def parse_overrides(overrides: Sequence[str]) -> list[tuple[tuple[str, ...], object]]:
    """Return path and content of every override.

    Raises:
        ConfigError: Some overrides are malformed; the message lists all of them.
    """
    parsed: list[tuple[tuple[str, ...], object]] = []
    problems: list[str] = []
    for override in overrides:
        try:
            parsed.append(_parse_override(override))
        except ConfigError as wrong:
            problems.append(str(wrong))
    if problems:
        raise ConfigError(join_problems(problems))
    return parsed


def parse_key(key: str) -> tuple[str, ...]:
    """Return the parts of a dotted key; parts with special characters are quoted as in TOML."""
    path: list[str] = []
    table: object = _parse_toml(f"{key} = 0") if key.isprintable() else None
    while isinstance(table, dict) and len(table) == 1:
        name, table = next(iter(table.items()))
        path.append(name)
    if not path or table != 0:
        raise ConfigError(f"{key!r} is not a key; write it as table.key, letters and digits")
    return tuple(path)


def _parse_override(override: str) -> tuple[tuple[str, ...], object]:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f'override {override!r}: no "=" in it; write it as table.key=value')
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ConfigError(f"override {override!r}: the value is not UTF-8 text")
    try:
        path = parse_key(key.strip())
    except ConfigError as wrong:
        raise ConfigError(f"override {override!r}: {wrong}") from None
    if not text.strip():
        return path, UNSET_OVERRIDE
    table = _parse_toml(f"value = {text}")
    # A value that contains a line break may parse as several keys; then it is plain text.
    return path, table["value"] if table is not None and len(table) == 1 else text


def _parse_toml(text: str) -> dict[str, object] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def _unreadable_file_message(file: Path, wrong: Exception) -> str:
    name = escape_unprintable(str(file))
    if isinstance(wrong, IsADirectoryError):
        return f"{name} is a directory; name the run file in it"
    if isinstance(wrong, FileNotFoundError | NotADirectoryError):
        return f"run file {name} does not exist{_similar_file_hint(file)}"
    reason = wrong.strerror if isinstance(wrong, OSError) else str(wrong)
    return f"run file {name} cannot be read: {reason}"


def _similar_file_hint(file: Path) -> str:
    if not file.parent.is_dir():
        return f"; nor does the folder {escape_unprintable(str(file.parent))}"
    files = [path.name for path in file.parent.iterdir() if path.is_file()]
    return did_you_mean(file.name, sorted(files))


def _with_line_number(reason: str, text: str) -> str:
    """Return the parser's reason, with line and column instead of "at end of document"."""
    lines = text.split("\n")
    end = f"at line {len(lines)}, column {len(lines[-1]) + 1}"
    return escape_unprintable(reason[:1].lower() + reason[1:]).replace("at end of document", end)


C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[C]):
    """A config, and the source of each of its values, by dotted key."""

    config: C
    source: Mapping[str, str]
    """``"default"``, ``"recipe"``, the run file's name, ``"override"``, or the note passed to
    `set_derived_values`."""


def load(
    model: type[C],
    file: Path | None,
    overrides: Sequence[str] = (),
    recipe: Mapping[str, object] | None = None,
) -> LoadedConfig[C]:
    """Merge ``recipe``, ``file`` and ``overrides``, in rising priority; validate as ``model``.

    Overrides of a ``kind`` are applied first, whatever their order. When an override changes the
    kind of a table, the settings for the other kind are dropped. An override without a value
    (``table.key=``) unsets the key: settings of recipe, file and earlier overrides are removed.

    Raises:
        ConfigError: The config is invalid; the message lists every problem.
    """
    source = escape_unprintable(file.name) if file else "no run file"
    try:
        table = fill_inherited_defaults(model, build_table(recipe or {}, SOURCE_RECIPE))
        tables = with_new_keys(read_run_file(file), source) if file else {}
        file_table = build_table(tables, source)
        table = fill_inherited_defaults(model, merge_tables(table, file_table))
        table, unset_keys = _apply_overrides(model, table, overrides)
        return _validate(model, table, source, unset_keys)
    except RecursionError:
        raise ConfigError(f"{source}: {NESTED_TOO_DEEPLY}") from None


def set_derived_values(
    loaded: LoadedConfig[C], derived: Mapping[str, object], note: str = "derived"
) -> LoadedConfig[C]:
    """Return a copy in which the dotted keys of ``derived`` are set, with source ``note``.

    Values may be of any type that a config holds, including tuples, paths and configs. Tables are
    merged key by key. The result is validated like a file.
    """
    table = config_tree(loaded)
    for key, value in derived.items():
        content = to_jsonable_python(value)
        table = merge_tables(table, nest_under(parse_key(key), build_tree(content, note)))
    return _validate(type(loaded.config), table, note)


def replace_table(
    loaded: LoadedConfig[C], key: str, content: Mapping[str, object], note: str
) -> LoadedConfig[C]:
    """Return a copy whose table ``key`` is ``content``, with source ``note``; validated."""
    tree = build_tree(to_jsonable_python(content), note)
    return _validate(type(loaded.config), {**config_tree(loaded), key: tree}, note)


def config_tree(loaded: LoadedConfig[C]) -> SettingsTable:
    """Return the whole config as a tree whose leaves have sources."""
    return with_sources(_dump_to_table(loaded.config), loaded.source)


def _apply_overrides(
    model: type[C], table: SettingsTable, overrides: Sequence[str]
) -> tuple[SettingsTable, list[tuple[str, ...]]]:
    """Return ``table`` merged with ``overrides``, and the keys that overrides unset."""
    override_trees: list[tuple[tuple[str, ...], SettingsTree]] = []
    unset_keys: list[tuple[str, ...]] = []
    for given_path, content in parse_overrides(overrides):
        path = with_new_path(given_path, SOURCE_OVERRIDE)
        if content is UNSET_OVERRIDE:
            table = unset_key(model, table, path)
            override_trees = [(at, remove_key(tree, path)) for at, tree in override_trees]
            unset_keys.append(path)
        else:
            override_trees.append((path, nest_under(path, build_tree(content, SOURCE_OVERRIDE))))
    for _, tree in sorted(override_trees, key=_kind_overrides_first):
        if any(iter_leaves(tree)):
            table = merge_tables(table, tree)
    for path in unset_keys:
        enclosing_table = fill_inherited_defaults(
            model, merge_tables(table, nest_under(path[:-1], {}))
        )
        if not accepts_key(model, strip_sources(enclosing_table), path):
            # Keep the unknown key, so that the validator reports it.
            table = merge_tables(table, nest_under(path, build_tree("", SOURCE_OVERRIDE)))
    return table, unset_keys


def _kind_overrides_first(override: tuple[tuple[str, ...], object]) -> tuple[bool, int]:
    path, _ = override
    return (path[-1] != "kind", len(path) if path[-1] == "kind" else 0)


def _validate(
    model: type[C],
    table: SettingsTable,
    source: str,
    unset_keys: Collection[tuple[str, ...]] = (),
) -> LoadedConfig[C]:
    table = fill_inherited_defaults(model, table)
    # As JSON: only there does strict validation accept a list as a tuple and text as a path.
    text = json.dumps(strip_sources(table), default=_date_to_text)
    try:
        config = model.model_validate_json(text)
    except ValidationError as wrong:
        errors = wrong.errors(include_url=False, include_input=False)
        raise ConfigError(
            format_validation_errors(model, table, errors, source, unset_keys)
        ) from None
    given = {path: leaf.source for path, leaf in iter_leaves(table)}
    paths = (path for path, _ in iter_leaves(_dump_to_table(config)))
    return LoadedConfig(config, {dotted_key(path): _source_of(given, path) for path in paths})


def _dump_to_table(config: Config) -> SettingsTable:
    return build_table(config.model_dump(mode="json"), SOURCE_DEFAULT)


def _source_of(given: Mapping[tuple[str, ...], str], path: tuple[str, ...]) -> str:
    """Return the source of ``path``, or of the key that a validator expanded into ``path``."""
    prefixes = (path[:end] for end in range(len(path), 0, -1))
    return next((given[prefix] for prefix in prefixes if prefix in given), SOURCE_DEFAULT)


def _date_to_text(value: object) -> str:
    assert isinstance(value, date | time), f"TOML has no {type(value).__name__}"
    return value.isoformat()


def to_toml(loaded: LoadedConfig[C]) -> str:
    """Return a run file with every setting and its source; `load` reads it to an equal config.

    TOML has no null. A field that is None becomes a comment line, and is None again after loading
    if that is its default.
    """
    return "\n".join(_table_lines((), config_tree(loaded))).lstrip("\n") + "\n"


def _table_lines(header: tuple[str, ...], table: SettingsTable) -> Iterator[str]:
    """Yield the settings of ``table``, then its sub-tables, in the order that TOML requires."""
    for key, item in table.items():
        if isinstance(item, SettingValue):
            yield _setting_line(toml_key(key), item)
    for key, item in table.items():
        yield from _sub_table_lines((*header, key), item)


def _setting_line(key: str, leaf: SettingValue) -> str:
    if leaf.content is None:
        return f"# {key}: not set"
    return f"{key} = {toml_value(leaf.content)}  # {escape_unprintable(leaf.source)}"


def _sub_table_lines(header: tuple[str, ...], item: SettingsTree) -> Iterator[str]:
    if isinstance(item, dict):
        yield from ("", f"[{dotted_key(header)}]", *_table_lines(header, item))
    elif isinstance(item, list):
        for row in item:
            if isinstance(row, dict):
                yield from ("", f"[[{dotted_key(header)}]]", *_table_lines(header, row))

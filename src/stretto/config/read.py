"""The two things a user writes, taken apart: a run file and ``table.key=value`` overrides."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from stretto.config.text import listed, nearest, printable
from stretto.errors import ConfigError

TAKEN_BACK = object()
"""The content of an override with nothing behind its sign: as if nobody had set the key."""


def read_file(file: Path) -> dict[str, object]:
    """Return the tables of ``file``, unchecked."""
    name = printable(str(file))
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise ConfigError(
            f"{name}: not UTF-8 text: byte {wrong.start} cannot be read; save the file as UTF-8"
        ) from None
    except (OSError, ValueError) as wrong:
        raise ConfigError(_unreadable(file, wrong)) from None
    try:
        return tomllib.loads(text)
    except ValueError as wrong:
        raise ConfigError(f"{name}: not TOML: {_located(str(wrong), text)}") from None


def parse_overrides(overrides: Sequence[str]) -> list[tuple[tuple[str, ...], object]]:
    """Return path and content of every override; complain about all malformed ones at once."""
    parsed: list[tuple[tuple[str, ...], object]] = []
    problems: list[str] = []
    for override in overrides:
        try:
            parsed.append(_parse_override(override))
        except ConfigError as wrong:
            problems.append(str(wrong))
    if problems:
        raise ConfigError(listed(problems))
    return parsed


def parse_key(key: str) -> tuple[str, ...]:
    """Return the parts of a dotted key; a part with other signs in it is quoted as in TOML."""
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
        return path, TAKEN_BACK
    table = _parse_toml(f"value = {text}")
    # One key, or else the text smuggled in a line of its own: then it is just text.
    return path, table["value"] if table is not None and len(table) == 1 else text


def _parse_toml(text: str) -> dict[str, object] | None:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def _unreadable(file: Path, wrong: Exception) -> str:
    name = printable(str(file))
    if isinstance(wrong, IsADirectoryError):
        return f"{name} is a directory; name the run file in it"
    if isinstance(wrong, FileNotFoundError | NotADirectoryError):
        return f"run file {name} does not exist{_neighbour(file)}"
    reason = wrong.strerror if isinstance(wrong, OSError) else str(wrong)
    return f"run file {name} cannot be read: {reason}"


def _neighbour(file: Path) -> str:
    if not file.parent.is_dir():
        return f"; nor does the folder {printable(str(file.parent))}"
    files = [path.name for path in file.parent.iterdir() if path.is_file()]
    return nearest(file.name, sorted(files))


def _located(reason: str, text: str) -> str:
    """Return the parser's reason, with line and column where it only says "the end"."""
    lines = text.split("\n")
    end = f"at line {len(lines)}, column {len(lines[-1]) + 1}"
    return printable(reason[:1].lower() + reason[1:]).replace("at end of document", end)

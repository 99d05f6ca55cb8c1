"""The record of a study: written after every cell, so that an interrupted one goes on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stretto.errors import ConfigError
from stretto.study.nodes.lab import Timed
from stretto.telemetry.aside import write_aside

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One strategy on one number of hosts."""

    strategy: str
    """As it was asked for."""
    hosts: int
    settings: Mapping[str, object]
    """Of the strategy."""
    predicted: Mapping[str, Any] | None = None
    """What was told before anything ran; None where it has no price."""
    left_out: str = ""
    """Why it has none."""
    timed: Timed | None = None
    given: Mapping[str, Any] | None = None
    """What is told once it is known how long computation takes here."""

    @property
    def key(self) -> tuple[str, int]:
        """Which one it is."""
        return self.strategy, self.hosts


@dataclass(slots=True)
class Record:
    """All cells that are finished, and what they have in common."""

    path: Path
    settings: Mapping[str, object]
    cells: dict[tuple[str, int], Cell] = field(default_factory=dict)

    def add(self, cell: Cell) -> None:
        """Keep a cell; it is in the file when this returns."""
        self.cells[cell.key] = cell
        cells = [asdict(one) for one in self.cells.values()]
        told = {"schema": SCHEMA, "settings": self.settings, "cells": cells}
        write_aside(self.path, json.dumps(told, indent=1) + "\n")

    def finished(self, strategy: str, hosts: int, *, timed: bool) -> Cell | None:
        """Return the cell if it is there, and was measured if it is to be."""
        cell = self.cells.get((strategy, hosts))
        return cell if cell is not None and (cell.timed is not None or not timed) else None


def open_record(path: Path, settings: Mapping[str, object]) -> Record:
    """Go on with the record of ``path``, or begin it.

    Raises:
        ConfigError: It is none, or one of other settings.
    """
    settings = json.loads(json.dumps(settings))
    if not path.exists():
        return Record(path, settings)
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        before, cells = told["settings"], [_cell(one) for one in told["cells"]]
        schema = told["schema"]
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise ConfigError(
            f"--out {path}: this is no record of a study of nodes ({wrong})"
        ) from None
    if schema != SCHEMA:
        raise ConfigError(f"--out {path}: a record of version {schema}; this one is {SCHEMA}")
    if differing := _differing(before, settings):
        first = differing[0]
        raise ConfigError(
            f"--out {path} is the record of another study: {first} was {before.get(first)!r} "
            f"there and is {settings.get(first)!r} here; say the same to go on with it, or take "
            "another --out"
        )
    return Record(path, settings, {cell.key: cell for cell in cells})


def check_same(record: Record, cell: Cell, runs: int | None) -> None:
    """See that a cell of the record, if it is there, has these settings, and was timed so often.

    Raises:
        ConfigError: It has others, or was not; ``runs`` is None where nothing is timed.
    """
    before = record.cells.get(cell.key)
    if before is None:
        return
    settings = json.loads(json.dumps(cell.settings))
    differing = _differing(before.settings, settings)
    if differing:
        raise ConfigError(
            f"--out {record.path}: {cell.strategy} had another strategy.{differing[0]} there; take "
            "another --out"
        )
    if runs is not None and before.timed is not None and before.timed.runs != runs:
        raise ConfigError(
            f"--out {record.path}: {cell.strategy} on {cell.hosts} hosts was timed with --runs "
            f"{before.timed.runs}; say the same to go on with it, or take another --out"
        )


def _differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def _cell(told: Mapping[str, Any]) -> Cell:
    timed = told["timed"]
    return Cell(**{**told, "timed": None if timed is None else Timed(**timed)})

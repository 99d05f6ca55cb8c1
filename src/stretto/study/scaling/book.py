"""A study's book: every finished run is a line, so that an interrupted study goes on."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from stretto.errors import ConfigError
from stretto.study.scaling.sweep import Cell, Done, Point

_ABOUT, _RUNS = "study.json", "runs.jsonl"


class Book:
    """The runs of one study, in a folder."""

    def __init__(self, folder: Path, about: dict[str, object]) -> None:
        """Open it, or begin it.

        Raises:
            ConfigError: The folder holds a study of something else.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _RUNS
        known = folder / _ABOUT
        mine = json.dumps(about, indent=1, sort_keys=True) + "\n"
        if known.exists() and known.read_text(encoding="utf-8") != mine:
            differ = _differing(json.loads(known.read_text(encoding="utf-8")), json.loads(mine))
            raise ConfigError(
                f"{folder} holds a study with another {differ}: say the same to go on with it, or "
                "take another --out"
            )
        known.write_text(mine, encoding="utf-8")
        self.done: dict[Cell, Done] = dict(self._read())

    def write(self, cell: Cell, done: Done) -> None:
        """Add a run; it is on the disk when this returns."""
        self.done[cell] = done
        line = json.dumps({"cell": asdict(cell), "done": asdict(done)})
        with self._path.open("a", encoding="utf-8") as book:
            book.write(line + "\n")
            book.flush()
            os.fsync(book.fileno())

    def _read(self) -> list[tuple[Cell, Done]]:
        """Return all runs; what a crash left of a last line is cut off."""
        if not self._path.exists():
            return []
        whole, newline, _torn = self._path.read_text(encoding="utf-8").rpartition("\n")
        self._path.write_text(whole + newline, encoding="utf-8")
        return [_from_json(json.loads(line)) for line in whole.splitlines()]


def _from_json(entry: dict[str, dict[str, object]]) -> tuple[Cell, Done]:
    cell, done = dict(entry["cell"]), dict(entry["done"])
    point = Point(**cell.pop("point"))  # type: ignore[arg-type]
    apart = tuple((step, far) for step, far in done.pop("apart"))  # type: ignore[attr-defined]
    return Cell(point, **cell), Done(apart=apart, **done)  # type: ignore[arg-type]


def _differing(one: dict[str, object], other: dict[str, object]) -> str:
    keys = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
    return ", ".join(keys)

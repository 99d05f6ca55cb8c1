"""Cells of a study of nodes: measuring one in a lab, and the record that keeps finished ones.

The record is written after every cell, so an interrupted study continues where it stopped.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stretto.bench.peers import NO_COMMUNICATION, NO_PEERS
from stretto.errors import ConfigError, LaunchError
from stretto.launch.worker_group import with_parent_death_signal
from stretto.renamed import with_new_settings
from stretto.telemetry.sinks import write_atomically

RECORD_VERSION = 1
_SHUTDOWN_TIMEOUT_S = 60
"""Seconds that a lab may take to shut down when the study is interrupted."""


@dataclass(frozen=True, slots=True)
class MeasurementJob:
    """One cell to measure: a run and the lab in which it runs."""

    run: Path
    overrides: tuple[str, ...]
    hosts: int
    ranks_per_host: int
    rate: str
    runs: int
    steps: int
    """Steps that are timed together: whole periods of the strategy."""

    def argv(self) -> list[str]:
        """Return the command that measures: ``stretto bench step`` on every rank of a lab."""
        lab = ["lab", "--hosts", str(self.hosts), "--ranks-per-host", str(self.ranks_per_host)]
        bench = ["bench", "step", *self.overrides, "--run", str(self.run)]
        timing = ["--runs", str(self.runs), "--steps", str(self.steps)]
        return [
            sys.executable,
            "-m",
            "stretto",
            *lab,
            "--rate",
            self.rate,
            "--",
            "stretto",
            *bench,
            *timing,
            "--peers",
            NO_PEERS,
            "--json",
        ]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measured time of a step."""

    step_s: float
    compute_s: float
    """The time of a step without communication, from the same rounds."""
    spread: float
    """Width of the middle half of the rounds' times, as a share of their median."""
    runs: int
    """The number of rounds timed."""

    @property
    def efficiency(self) -> float:
        """The share of the step that is computation."""
        return self.compute_s / self.step_s


MeasureStep = Callable[[MeasurementJob], MeasuredStep]


def measure_in_lab(job: MeasurementJob) -> MeasuredStep:
    """Measure a step in a lab. The child's standard error is passed through.

    Raises:
        LaunchError: The lab failed, or printed no step time.
    """
    lines = _run_and_read(job.argv()).splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    baseline_rows = [row for row in rows if row["peer"] == NO_COMMUNICATION]
    if not baseline_rows:
        raise LaunchError(f"the lab of {job.hosts} hosts printed no step time: {lines[-1:]}")
    row = baseline_rows[0]
    return MeasuredStep(row["ours_s"], row["peer_s"], row["spread"], row["runs"])


def _run_and_read(argv: Sequence[str]) -> str:
    """Run a command and return its output. It is terminated if we are interrupted or killed."""
    with subprocess.Popen(
        with_parent_death_signal(argv, death_signal="TERM"), stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            output, _ = child.communicate()
        except BaseException:
            child.terminate()
            child.wait(_SHUTDOWN_TIMEOUT_S)
            raise
    if child.returncode:
        raise LaunchError(
            f"measuring failed with {child.returncode}; what was finished is kept: "
            f"{' '.join(argv[2:])}"
        )
    return output


@dataclass(frozen=True, slots=True)
class NodesCell:
    """The results of one strategy on one number of hosts."""

    strategy: str
    """The strategy as it was requested: a kind and its settings."""
    hosts: int
    settings: Mapping[str, object]
    """The settings of the strategy."""
    predicted: Mapping[str, Any] | None = None
    """The prediction made before anything ran; None if the strategy cannot be priced."""
    left_out: str = ""
    """Why there is no prediction."""
    timed: MeasuredStep | None = None
    given: Mapping[str, Any] | None = None
    """The prediction with the measured compute time."""

    @property
    def key(self) -> tuple[str, int]:
        """The strategy and the number of hosts."""
        return self.strategy, self.hosts


@dataclass(slots=True)
class NodesRecord:
    """The finished cells of a study, and the settings that they share."""

    path: Path
    settings: Mapping[str, object]
    cells: dict[tuple[str, int], NodesCell] = field(default_factory=dict)

    def add(self, cell: NodesCell) -> None:
        """Add a cell and write the file."""
        self.cells[cell.key] = cell
        cells = [asdict(one) for one in self.cells.values()]
        data = {"schema": RECORD_VERSION, "settings": self.settings, "cells": cells}
        write_atomically(self.path, json.dumps(data, indent=1) + "\n")

    def find_finished(self, strategy: str, hosts: int, *, timed: bool) -> NodesCell | None:
        """Return the cell if it is finished; with ``timed``, only if it was measured."""
        cell = self.cells.get((strategy, hosts))
        return cell if cell is not None and (cell.timed is not None or not timed) else None


def open_record(path: Path, settings: Mapping[str, object]) -> NodesRecord:
    """Open the record at ``path``, or start a new one.

    Raises:
        ConfigError: The file is not a record, or its settings differ from ``settings``.
    """
    settings = json.loads(json.dumps(settings))
    if not path.exists():
        return NodesRecord(path, settings)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        recorded = with_new_settings(data["settings"])
        cells = [_parse_cell(one) for one in data["cells"]]
        schema = data["schema"]
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise ConfigError(
            f"--out {path}: this is no record of a study of nodes ({wrong})"
        ) from None
    if schema != RECORD_VERSION:
        raise ConfigError(
            f"--out {path}: a record of version {schema}; this one is {RECORD_VERSION}"
        )
    if differing := _differing_keys(recorded, settings):
        first = differing[0]
        raise ConfigError(
            f"--out {path} is the record of another study: {first} was {recorded.get(first)!r} "
            f"there and is {settings.get(first)!r} here; use the same value to continue it, or "
            "another --out"
        )
    return NodesRecord(path, settings, {cell.key: cell for cell in cells})


def check_same_settings(record: NodesRecord, cell: NodesCell, runs: int | None) -> None:
    """Check that a recorded cell has the same settings and number of timed rounds as ``cell``.

    Args:
        record: The record; nothing is checked if it lacks the cell.
        cell: The cell as the study wants it.
        runs: The number of rounds to time; None if nothing is timed.

    Raises:
        ConfigError: The settings or the number of rounds differ.
    """
    recorded = record.cells.get(cell.key)
    if recorded is None:
        return
    settings = json.loads(json.dumps(cell.settings))
    differing = _differing_keys(recorded.settings, settings)
    if differing:
        raise ConfigError(
            f"--out {record.path}: {cell.strategy} had another strategy.{differing[0]} there; use "
            "another --out"
        )
    if runs is not None and recorded.timed is not None and recorded.timed.runs != runs:
        raise ConfigError(
            f"--out {record.path}: {cell.strategy} on {cell.hosts} hosts was timed with --runs "
            f"{recorded.timed.runs}; use the same value to continue it, or another --out"
        )


def _differing_keys(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def _parse_cell(data: Mapping[str, Any]) -> NodesCell:
    timed = data["timed"]
    return NodesCell(**{**data, "timed": None if timed is None else MeasuredStep(**timed)})

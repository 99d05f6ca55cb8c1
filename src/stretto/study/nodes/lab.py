"""One cell of a study measured: steps timed by a child process, as every rank of a lab."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import LaunchError
from stretto.launch.processes import guarded
from stretto.study.contenders import ALONE, NOBODY

_PATIENCE_S = 60
"""How long a lab may take to clear up when the study is interrupted."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be timed, and where."""

    run: Path
    overrides: tuple[str, ...]
    hosts: int
    ranks_per_host: int
    rate: str
    runs: int
    steps: int
    """Timed as one: a period of the strategy."""

    def argv(self) -> list[str]:
        """Return the command that does it."""
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
            NOBODY,
            "--json",
        ]


@dataclass(frozen=True, slots=True)
class Timed:
    """What a step took."""

    step_s: float
    compute_s: float
    """Without communication, in the same rounds."""
    spread: float
    """Middle half of the rounds, as a share of their median."""
    runs: int
    """Rounds that were timed."""

    @property
    def efficiency(self) -> float:
        """Which share of the step is computation."""
        return self.compute_s / self.step_s


Measure = Callable[[Order], Timed]


def measure_in_lab(order: Order) -> Timed:
    """Return what a step takes in a lab; what the child says on standard error is everybody's.

    Raises:
        LaunchError: It did not come to an end, or told nothing.
    """
    lines = _output(order.argv()).splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    alone = [row for row in rows if row["peer"] == ALONE]
    if not alone:
        raise LaunchError(f"the lab of {order.hosts} hosts told no step time: {lines[-1:]}")
    row = alone[0]
    return Timed(row["ours_s"], row["peer_s"], row["spread"], row["runs"])


def _output(argv: Sequence[str]) -> str:
    """Run a command to its end; it is asked to end when we are interrupted, or die."""
    with subprocess.Popen(guarded(argv, by="TERM"), stdout=subprocess.PIPE, text=True) as child:
        try:
            output, _ = child.communicate()
        except BaseException:
            child.terminate()
            child.wait(_PATIENCE_S)
            raise
    if child.returncode:
        raise LaunchError(
            f"measuring failed with {child.returncode}; what was finished is kept: "
            f"{' '.join(argv[2:])}"
        )
    return output

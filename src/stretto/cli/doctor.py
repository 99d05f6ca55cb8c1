"""``stretto doctor``: look before a run fails."""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.doctor.records import Finding

LONGEST_PATIENCE_S = 3600.0


def doctor(
    *words: str, workers: int | None = None, patience: float = 20.0, json_: bool = False
) -> int:
    """Check machine, launcher, peers, ports, disk, clocks and time-outs; one line each.

    Alone it checks this machine; with --workers it starts that many ranks here; under torchrun,
    srun, mpirun or in a lab it joins, and all ranks check one another. The exit code is 1 when
    something fails.

    Parameters
    ----------
    words
        A run file (TOML), if there is one, then settings laid over it, as table.key=value.
    workers
        Ranks to start here.
    patience
        Seconds to wait for the other ranks.
    json_
        One object a line on standard output.
    """
    if not 1 <= patience <= LONGEST_PATIENCE_S:
        most = f"{LONGEST_PATIENCE_S:g}"
        raise ConfigError(f"--patience {patience:g}: expected 1 to {most} seconds")
    if workers is not None:
        options = ["--patience", str(patience), *(["--json"] if json_ else [])]
        return _launch([*words, *options], workers)
    findings = _examine(words, patience)
    for found in findings:
        print(json.dumps(asdict(found)) if json_ else _line(found), flush=True)
    return int(any(found.status == "FAIL" for found in findings))


def _examine(words: Sequence[str], patience_s: float) -> "list[Finding]":
    """Return what the checks say on the rank that speaks, nothing on the others."""
    from stretto.cluster.detect import detect, explain
    from stretto.config import load
    from stretto.doctor.checks import judge
    from stretto.doctor.examine import examine
    from stretto.doctor.need import purpose_of
    from stretto.recipes import load_run
    from stretto.run import RunConfig

    run = Path(words[0]) if words and "=" not in words[0] else None
    # model.target may name a module beside the run file or where we stand, as `python -m` allows.
    sys.path[:0] = [str((run or Path()).parent.resolve()), str(Path.cwd())]
    config = load_run(run, words[1:]).config if run else load(RunConfig, None, words).config
    world = detect()
    # Rank 0 alone writes checkpoints, so it alone builds the model to know their size.
    purpose = purpose_of(config, model_is_known=run is not None and world.rank == 0)
    seen = examine(world, explain(), purpose, patience_s)
    return judge(seen) if seen else []


def _launch(arguments: list[str], workers: int) -> int:
    from stretto.cli.train import check_workers
    from stretto.launch.local import run_here

    check_workers(workers)
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="stretto-doctor-") as logs:
        outcome = run_here(["doctor", *arguments], workers, logs=Path(logs), say=said.append)
    # Rank 0 ends with 1 when it has found something, which it said itself.
    if (outcome.failed_rank, outcome.exit_code) != (0, 1):
        for line in filter(None, [*said, outcome.reason]):
            _say(line)
    return outcome.exit_code


def _line(found: "Finding") -> str:
    from stretto.telemetry.wording import printable

    advice = f"; {found.advice}" if found.advice else ""
    return printable(f"{found.status:<5} {found.check}: {found.finding}{advice}")


def _say(line: str) -> None:
    print(f"stretto doctor: {line}", file=sys.stderr)

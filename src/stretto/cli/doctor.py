"""``stretto doctor``: find problems of machines and network before a run fails."""

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

MAX_PATIENCE_S = 3600.0


def doctor(
    *run_and_overrides: str, workers: int | None = None, patience: float = 20.0, json_: bool = False
) -> int:
    """Check machine, launcher, peers, ports, disk, clocks and time-outs; one line each.

    Started alone it checks this machine; with --workers it starts that many ranks here; under
    torchrun, srun, mpirun or in a lab all ranks check one another. The exit code is 1 if a check
    fails.

    Parameters
    ----------
    run_and_overrides
        A run file (TOML), if there is one, then settings that override it, as table.key=value.
    workers
        Number of ranks to start on this machine.
    patience
        Seconds to wait for the other ranks.
    json_
        One object a line on standard output.
    """
    if not 1 <= patience <= MAX_PATIENCE_S:
        most = f"{MAX_PATIENCE_S:g}"
        raise ConfigError(f"--patience {patience:g}: expected 1 to {most} seconds")
    if workers is not None:
        options = ["--patience", str(patience), *(["--json"] if json_ else [])]
        return _launch([*run_and_overrides, *options], workers)
    findings = _examine(run_and_overrides, patience)
    for found in findings:
        print(json.dumps(asdict(found)) if json_ else _format_finding(found), flush=True)
    return int(any(found.status == "FAIL" for found in findings))


def _examine(run_and_overrides: Sequence[str], patience_s: float) -> "list[Finding]":
    """Return the findings on the coordinator, nothing on other ranks."""
    from stretto.cluster.detect import describe_detection, detect_world
    from stretto.config import load
    from stretto.doctor.checks import run_checks
    from stretto.doctor.gather_facts import gather_facts, requirements_of
    from stretto.recipes import load_run
    from stretto.run import RunConfig

    run = (
        Path(run_and_overrides[0])
        if run_and_overrides and "=" not in run_and_overrides[0]
        else None
    )
    # model.target may name a module beside the run file or in the working directory.
    sys.path[:0] = [str((run or Path()).parent.resolve()), str(Path.cwd())]
    config = (
        load_run(run, run_and_overrides[1:]).config
        if run
        else load(RunConfig, None, run_and_overrides).config
    )
    world = detect_world()
    # Rank 0 alone writes checkpoints, so it alone builds the model to know their size.
    requirements = requirements_of(config, model_is_known=run is not None and world.rank == 0)
    examination = gather_facts(world, describe_detection(), requirements, patience_s)
    return run_checks(examination) if examination else []


def _launch(arguments: list[str], workers: int) -> int:
    from stretto.cli.train import check_workers
    from stretto.launch.local_workers import run_local_workers

    check_workers(workers)
    output_lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="stretto-doctor-") as logs:
        outcome = run_local_workers(
            ["doctor", *arguments], workers, logs=Path(logs), log_line=output_lines.append
        )
    # Rank 0 exits with 1 if a check failed, and has printed the finding itself.
    if (outcome.failed_rank, outcome.exit_code) != (0, 1):
        for line in filter(None, [*output_lines, outcome.reason]):
            _say(line)
    return outcome.exit_code


def _format_finding(found: "Finding") -> str:
    from stretto.telemetry.event_text import strip_unprintable

    advice = f"; {found.advice}" if found.advice else ""
    return strip_unprintable(f"{found.status:<5} {found.check}: {found.finding}{advice}")


def _say(line: str) -> None:
    print(f"stretto doctor: {line}", file=sys.stderr)

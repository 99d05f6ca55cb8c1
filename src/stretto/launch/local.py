"""Workers on this machine: the launcher holds the store, starts the ranks and watches them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from stretto.cluster.beats import read_verdict
from stretto.cluster.store import hold_store
from stretto.cluster.words import fair_threads
from stretto.errors import ConfigError
from stretto.launch.parent import PARENT, WORKERS
from stretto.launch.pipes import Screen
from stretto.launch.processes import Outcome, Worker
from stretto.launch.watch import run_workers

PICTURE_ROWS = 6
"""Rows of rank 0's live picture; it erases as many above the cursor when it draws itself anew."""


def run_here(
    arguments: Sequence[str],
    workers: int,
    *,
    logs: Path,
    say: Callable[[str], None],
    keep_logs: bool = False,
) -> Outcome:
    """Run ``stretto ARGUMENTS`` as ``workers`` ranks on loopback; return how they ended.

    What they say goes to ``logs/rank-N.log`` and, identical lines folded, to our screen. Where
    that is a terminal, rank 0 keeps it to draw on, and has no log. With ``keep_logs`` it is added
    to what an earlier start has left there.
    """
    held = hold_store("127.0.0.1")
    _make_folder(logs, keep_logs)
    argv = [sys.executable, "-m", "stretto", *arguments]
    draws = _draws(sys.stderr)
    crew = [
        Worker(
            rank,
            argv,
            _environment(rank, workers, held.port),
            log=None if draws and rank == 0 else logs / f"rank-{rank}.log",
        )
        for rank in range(workers)
    ]
    screen = Screen(sys.stdout, sys.stderr, rows_below=PICTURE_ROWS if draws else 0)
    return run_workers(crew, say=say, screen=screen, verdict=lambda: read_verdict(held.store))


def _make_folder(logs: Path, keep_logs: bool) -> None:
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for old in () if keep_logs else logs.glob("rank-*.log"):
            old.unlink()
    except OSError as failure:
        raise ConfigError(f"folder {logs} cannot be made ready: {failure.strerror}") from failure


def _draws(stream: TextIO) -> bool:
    """Say whether rank 0 would draw a picture here rather than write lines."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def _environment(rank: int, workers: int, port: int) -> Mapping[str, str]:
    """Return torchrun's words, so that anything that runs under torchrun runs here."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(fair_threads(workers)),
        "STRETTO_LAUNCHER": WORKERS,
        PARENT: str(os.getpid()),
        # Else what a rank prints waits for a full buffer, and is lost when it is killed.
        "PYTHONUNBUFFERED": "1",
    }

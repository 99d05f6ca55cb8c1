"""The ranks of ``stretto train --workers N``: their store, commands and environments.

`stretto.launch.supervise` starts and watches them.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from stretto.cluster.environment import threads_per_rank
from stretto.cluster.heartbeats import read_failure_report
from stretto.cluster.store import serve_store
from stretto.errors import ConfigError
from stretto.launch.process_setup import LAUNCHER_NAME, PARENT_PID_VARIABLE
from stretto.launch.supervise import run_workers
from stretto.launch.worker_group import LaunchOutcome, WorkerSpec
from stretto.launch.worker_output import ConsoleStreams

LIVE_PROGRESS_ROWS = 6
"""Rows of rank 0's live display, which erases this many rows above the cursor to redraw."""


def run_local_workers(
    arguments: Sequence[str],
    workers: int,
    *,
    logs: Path,
    log_line: Callable[[str], None],
    keep_logs: bool = False,
) -> LaunchOutcome:
    """Run ``stretto ARGUMENTS`` as ``workers`` ranks on loopback; return how they ended.

    Their output goes to ``logs/rank-N.log`` and, with identical lines folded, to our screen. If the
    screen is a terminal, rank 0 writes to it directly and has no log. ``keep_logs`` appends to the
    logs of an earlier start instead of deleting them.
    """
    store_server = serve_store("127.0.0.1")
    _prepare_log_folder(logs, keep_logs)
    argv = [sys.executable, "-m", "stretto", *arguments]
    shows_live_progress = _shows_live_progress(sys.stderr)
    specs = [
        WorkerSpec(
            rank,
            argv,
            _environment(rank, workers, store_server.port),
            log=None if shows_live_progress and rank == 0 else logs / f"rank-{rank}.log",
        )
        for rank in range(workers)
    ]
    console_streams = ConsoleStreams(
        sys.stdout, sys.stderr, reserved_rows=LIVE_PROGRESS_ROWS if shows_live_progress else 0
    )
    return run_workers(
        specs,
        log_line=log_line,
        console_streams=console_streams,
        failure_report=lambda: read_failure_report(store_server.store),
    )


def _prepare_log_folder(logs: Path, keep_logs: bool) -> None:
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for old in () if keep_logs else logs.glob("rank-*.log"):
            old.unlink()
    except OSError as failure:
        raise ConfigError(f"cannot prepare log folder {logs}: {failure.strerror}") from failure


def _shows_live_progress(stream: TextIO) -> bool:
    """Return whether rank 0 would show a live display on ``stream`` instead of lines."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def _environment(rank: int, workers: int, port: int) -> Mapping[str, str]:
    """Return torchrun's variables, so that a program for torchrun also runs here."""
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
        "OMP_NUM_THREADS": str(threads_per_rank(workers)),
        "STRETTO_LAUNCHER": LAUNCHER_NAME,
        PARENT_PID_VARIABLE: str(os.getpid()),
        # Without this, buffered output is late, and lost when the rank is killed.
        "PYTHONUNBUFFERED": "1",
    }

"""Workers on this machine: the launcher holds the store, starts the ranks and watches them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stretto.cluster.detect import fair_threads
from stretto.cluster.store import hold_store
from stretto.errors import ConfigError
from stretto.launch.processes import Outcome, Worker, run_workers


def run_here(
    arguments: Sequence[str], workers: int, *, logs: Path, say: Callable[[str], None]
) -> Outcome:
    """Run ``stretto ARGUMENTS`` as ``workers`` ranks on loopback; return how they ended.

    Rank 0 keeps our terminal; the others write to ``logs/rank-N.log``.
    """
    held = hold_store("127.0.0.1")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ConfigError(f"folder {logs} cannot be made: {failure.strerror}") from failure
    argv = [sys.executable, "-m", "stretto", *arguments]
    crew = [
        Worker(rank, argv, _environment(rank, workers, held.port), _log(logs, rank))
        for rank in range(workers)
    ]
    return run_workers(crew, say=say)


def _log(logs: Path, rank: int) -> Path | None:
    return logs / f"rank-{rank}.log" if rank else None


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
        "STRETTO_LAUNCHER": "stretto train --workers",
    }

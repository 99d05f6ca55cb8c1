"""Generations: a number that grows with every (re)start of a run and fences off its ghosts.

A scheduler may declare a machine dead and restart the job while the old rank still runs there.
Such a rank holds an older generation than the newest one taken, so its commits are refused.
"""

import os
import re
from pathlib import Path

from stretto.checkpoint.layout import fsync_folder
from stretto.errors import CheckpointError

_NAME = re.compile(r"[0-9]{6,18}")


def current_generation(run_dir: Path) -> int:
    """Return the newest generation taken in ``run_dir``, 0 when none was."""
    folder = _folder(run_dir)
    if not folder.is_dir():
        return 0
    names = (path.name for path in folder.iterdir())
    return max((int(name) for name in names if _NAME.fullmatch(name)), default=0)


def next_generation(run_dir: Path) -> int:
    """Take and return a generation larger than every one taken before.

    Whoever starts the run calls this once per start. Two callers, also on two machines that
    share the disk, never get the same number: a file is created exclusively for each.
    """
    folder = _folder(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        generation = current_generation(run_dir) + 1
        while not _create(folder / f"{generation:06d}"):
            generation += 1
        fsync_folder(folder)
        fsync_folder(run_dir)
    except OSError as error:
        raise CheckpointError(
            f"no generation can be taken in {folder}: {error}; make the run folder writable"
        ) from error
    return generation


def refuse_stale(run_dir: Path, generation: int) -> None:
    """Raise `CheckpointError` when a newer start of the run has taken over."""
    newest = current_generation(run_dir)
    if generation < newest:
        raise CheckpointError(
            f"generation {generation} may not write to {run_dir}: generation {newest} has taken"
            " over the run; this process was left behind by a restart and should end"
        )


def _folder(run_dir: Path) -> Path:
    return run_dir / "generations"


def _create(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return True

"""Folder names and atomic renames of checkpoints, and the generations of a run.

| name | meaning |
|---|---|
| ``step-00000010`` | complete: renamed to this after everything was on disk |
| ``step-00000010.tmp-G-PID`` | being written or deleted by generation G |
| ``step-00000010.replaced-G-PID`` | complete, being replaced because step 10 was repeated |
| ``step-00000010.damaged-K`` | found damaged while loading; kept for inspection |

A generation is a number that grows with every (re)start of a run. A scheduler may declare a machine
dead and restart the job while the old rank is still running there. Such a rank holds an older
generation than the newest one, so its writes are refused.
"""

import errno
import os
import re
import shutil
from pathlib import Path

from stretto.errors import CheckpointError

MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"
MAX_STEP = 10**18 - 1
"""The largest step whose folder name can be parsed."""

_STEP = re.compile(r"step-([0-9]{8,18})")
_LEFTOVER = re.compile(r"step-[0-9]{8,18}\.tmp-([0-9]+)-[0-9]+")
_REPLACED = re.compile(r"(step-[0-9]{8,18})\.replaced-[0-9]+-[0-9]+")


def step_folder_name(step: int) -> str:
    """Return the folder name of ``step``; names sort like steps up to eight digits."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a folder's name; None unless the name is that of a complete checkpoint."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, oldest step first."""
    by_step = {step: path for path in _entries(folder) if (step := step_of(path)) is not None}
    return [by_step[step] for step in sorted(by_step)]


def staging_path(path: Path, generation: int) -> Path:
    """Return the temporary path at which this process writes or deletes ``path``."""
    return path.with_name(f"{path.name}.tmp-{generation}-{os.getpid()}")


def finish_replacements(folder: Path) -> None:
    """Complete or undo replacements that a crash interrupted; safe to call concurrently."""
    for path in _entries(folder):
        match = _REPLACED.fullmatch(path.name)
        if match is None:
            continue
        if (folder / match.group(1)).exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            _rename_if_exists(path, folder / match.group(1))


def clear_leftovers(folder: Path, generation: int) -> None:
    """Delete partial writes of earlier saves, of this or an older generation.

    Each generation has a single writer, and the caller is the writer of ``generation``. Nothing
    that is deleted here is in use.
    """
    for path in _entries(folder):
        match = _LEFTOVER.fullmatch(path.name)
        if match and int(match.group(1)) <= generation:
            shutil.rmtree(path, ignore_errors=True)


def commit(staging: Path, final: Path, generation: int) -> None:
    """Rename the folder ``staging`` to ``final``, replacing an existing checkpoint.

    A folder cannot be renamed onto a non-empty one. An existing ``final`` is therefore first
    renamed to a name from which `finish_replacements` restores it after a crash.
    """
    replaced = final.with_name(f"{final.name}.replaced-{generation}-{os.getpid()}")
    for _ in range(3):
        _rename_if_exists(final, replaced)
        try:
            staging.rename(final)
            break
        except OSError as error:
            # Between the two renames a reader's `finish_replacements` restored the old one.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    else:
        raise OSError(errno.EBUSY, "another process keeps putting the old checkpoint back", final)
    fsync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def discard(path: Path, generation: int) -> None:
    """Delete a checkpoint; it is renamed first, so that a crash leaves none that is incomplete."""
    staging = staging_path(path, generation)
    if _rename_if_exists(path, staging):
        shutil.rmtree(staging, ignore_errors=True)


def quarantine(path: Path) -> Path | None:
    """Rename a damaged checkpoint so that it is not tried again; None if it is gone already."""
    count = 1
    while (moved := path.with_name(f"{path.name}.damaged-{count}")).exists():
        count += 1
    return moved if _rename_if_exists(path, moved) else None


def fsync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until its bytes are on disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _rename_if_exists(source: Path, target: Path) -> bool:
    try:
        source.rename(target)
    except FileNotFoundError:
        return False
    return True


_GENERATION_FILE_NAME = re.compile(r"[0-9]{6,18}")


def current_generation(run_dir: Path) -> int:
    """Return the newest generation of the run in ``run_dir``, 0 if there is none."""
    folder = _generations_folder(run_dir)
    if not folder.is_dir():
        return 0
    names = (path.name for path in folder.iterdir())
    return max((int(name) for name in names if _GENERATION_FILE_NAME.fullmatch(name)), default=0)


def next_generation(run_dir: Path) -> int:
    """Create and return a new generation, larger than every earlier one.

    Call it once per start of the run. Two callers never get the same number, even on two machines
    that share the disk, because each number is an exclusively created file.
    """
    folder = _generations_folder(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        generation = current_generation(run_dir) + 1
        while not _create_exclusively(folder / f"{generation:06d}"):
            generation += 1
        fsync_folder(folder)
        fsync_folder(run_dir)
    except OSError as error:
        raise CheckpointError(
            f"cannot create a generation in {folder}: {error}; make the run folder writable"
        ) from error
    return generation


def refuse_stale(run_dir: Path, generation: int) -> None:
    """Raise `CheckpointError` if a newer start of the run exists."""
    newest = current_generation(run_dir)
    if generation < newest:
        raise CheckpointError(
            f"generation {generation} may not write to {run_dir}: the run was restarted as"
            f" generation {newest}; this process is left over from before and should end"
        )


def _generations_folder(run_dir: Path) -> Path:
    return run_dir / "generations"


def _create_exclusively(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return True

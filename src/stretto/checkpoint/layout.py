"""Names in a checkpoint folder, and the moves between them that a crash cannot tear.

| name | means |
|---|---|
| ``step-00000010`` | complete: it got this name by one rename, after everything was on disk |
| ``step-00000010.tmp-G-PID`` | being written or being deleted by generation G |
| ``step-00000010.replaced-G-PID`` | complete, on its way out because step 10 was done again |
| ``step-00000010.damaged-K`` | found damaged while loading; kept for a person to look at |
"""

import errno
import os
import re
import shutil
from pathlib import Path

MANIFEST = "manifest.json"
SEAL = "manifest.sha256"
MAX_STEP = 10**18 - 1
"""The largest step whose folder name is still read back."""

_STEP = re.compile(r"step-([0-9]{8,18})")
_LEFTOVER = re.compile(r"step-[0-9]{8,18}\.tmp-([0-9]+)-[0-9]+")
_REPLACED = re.compile(r"(step-[0-9]{8,18})\.replaced-[0-9]+-[0-9]+")


def step_name(step: int) -> str:
    """Return the folder name of ``step``; names sort like steps up to eight digits."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step a folder's name claims, None when it is not a complete checkpoint's."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def step_folders(folder: Path) -> list[Path]:
    """Return the complete checkpoints of ``folder``, oldest step first."""
    by_step = {step: path for path in _entries(folder) if (step := step_of(path)) is not None}
    return [by_step[step] for step in sorted(by_step)]


def aside_name(path: Path, generation: int) -> Path:
    """Return where this process writes, or deletes, what is or will be ``path``."""
    return path.with_name(f"{path.name}.tmp-{generation}-{os.getpid()}")


def finish_replacements(folder: Path) -> None:
    """Complete or undo replacements that a crash cut in two; readers may race each other."""
    for path in _entries(folder):
        match = _REPLACED.fullmatch(path.name)
        if match is None:
            continue
        if (folder / match.group(1)).exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            _rename_if_there(path, folder / match.group(1))


def clear_leftovers(folder: Path, generation: int) -> None:
    """Delete what earlier saves left half-written, of ``generation`` itself or an older one.

    A generation has one writer, and it is the caller, so nothing deleted here is in use.
    """
    for path in _entries(folder):
        match = _LEFTOVER.fullmatch(path.name)
        if match and int(match.group(1)) <= generation:
            shutil.rmtree(path, ignore_errors=True)


def commit(aside: Path, final: Path, generation: int) -> None:
    """Make the folder ``aside`` visible as ``final``, replacing what has that name.

    A folder cannot be renamed over a full one, so an existing ``final`` first steps aside
    under a name from which `finish_replacements` brings it back after a crash.
    """
    replaced = final.with_name(f"{final.name}.replaced-{generation}-{os.getpid()}")
    for _ in range(3):
        _rename_if_there(final, replaced)
        try:
            aside.rename(final)
            break
        except OSError as error:
            # A reader that came between the two renames has put the old one back.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    else:
        raise OSError(errno.EBUSY, "another process keeps putting the old checkpoint back", final)
    fsync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def discard(path: Path, generation: int) -> None:
    """Delete a checkpoint; cut short at any instant, no half of it looks complete."""
    aside = aside_name(path, generation)
    if _rename_if_there(path, aside):
        shutil.rmtree(aside, ignore_errors=True)


def quarantine(path: Path) -> Path | None:
    """Rename a damaged checkpoint so that nobody tries it again; None when it was gone already."""
    count = 1
    while (moved := path.with_name(f"{path.name}.damaged-{count}")).exists():
        count += 1
    return moved if _rename_if_there(path, moved) else None


def fsync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until its bytes are on disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _rename_if_there(source: Path, target: Path) -> bool:
    try:
        source.rename(target)
    except FileNotFoundError:
        return False
    return True

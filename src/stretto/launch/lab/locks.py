"""Who owns a lab: a live one holds an flock on a file named after it, a dead one cannot.

Note "a lock that can be taken is a dead lab's". A lab takes its lock before it makes anything and
removes the file after everything is gone. The kernel drops the lock when the owner dies, however it
dies. Whoever takes a lock then checks that the file it locked is still the one in the folder: else
another had taken it, cleared up and removed it, and the lock on the removed file means nothing.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.errors import LabError

FOLDERS = (Path("/run/stretto"), Path("/tmp/stretto-run"))
"""Where locks may live; the first that can be written to. All labs of a machine agree on it."""

_LOCK = re.compile(r"lab-([0-9a-f]{6})\.lock")


def lock_folder() -> Path:
    """Return the folder of the locks, made if need be."""
    for folder in FOLDERS:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise LabError(f"cannot write to {' or '.join(map(str, FOLDERS))}, where labs keep their locks")


def locked_ids(folder: Path) -> set[str]:
    """Return the ids of all lock files, held or not."""
    matches = (_LOCK.fullmatch(path.name) for path in folder.iterdir())
    return {match.group(1) for match in matches if match}


@contextmanager
def new_id(folder: Path) -> Iterator[tuple[str, int]]:
    """Choose a lab id that nobody holds; yield it with the descriptor of its lock, held."""
    lab_id, lock_fd = "", None
    while lock_fd is None:
        lab_id = secrets.token_hex(3)
        lock_fd = _take(folder, lab_id)
    try:
        yield lab_id, lock_fd
    finally:
        os.close(lock_fd)


@contextmanager
def taken_over(folder: Path, lab_id: str) -> Iterator[bool]:
    """Yield whether the lab is dead and now ours to clear; hold its lock meanwhile."""
    lock_fd = _take(folder, lab_id)
    try:
        yield lock_fd is not None
    finally:
        if lock_fd is not None:
            os.close(lock_fd)


def forget(folder: Path, lab_id: str) -> None:
    """Remove the lock file, last of all, by whoever holds the lock."""
    _path(folder, lab_id).unlink(missing_ok=True)


def _take(folder: Path, lab_id: str) -> int | None:
    path = _path(folder, lab_id)
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(lock_fd).st_ino:
            return lock_fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock_fd)
    return None


def _path(folder: Path, lab_id: str) -> Path:
    return folder / f"lab-{lab_id}.lock"

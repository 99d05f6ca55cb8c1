"""The folder a run writes to: how much room there is, and whether a file can be made there."""

import errno
import os
import tempfile
from pathlib import Path

from stretto.doctor.records import Folder

_TRIAL = bytes(4096)
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


def look_at_folder(path: Path) -> Folder:
    """Write and remove a file where the run would; look at the room that is left.

    A folder that is not there yet would be made by the run: its nearest parent is tried.
    """
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    room = os.statvfs(there)
    failure = _try_to_write(there)
    return Folder(
        path=str(path),
        free_bytes=room.f_bavail * room.f_frsize,
        free_inodes=room.f_favail if room.f_files else None,
        error=(failure.strerror or str(failure)) if failure else "",
        is_full=failure is not None and failure.errno in _NO_ROOM,
    )


def _try_to_write(folder: Path) -> OSError | None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".stretto-doctor-") as trial:
            trial.write(_TRIAL)
            trial.flush()
            # Some file systems notice only now that there is no room.
            os.fsync(trial.fileno())
    except OSError as failure:
        return failure
    return None

"""Loading: every byte is checked against the manifest, and the newest valid checkpoint wins."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from stretto.checkpoint.layout import (
    MANIFEST,
    SEAL,
    finish_replacements,
    quarantine,
    step_folders,
    step_of,
)
from stretto.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    DamagedError,
    FileEntry,
    Manifest,
    decode,
    seal_of,
)
from stretto.checkpoint.shards import describe_file, unpack
from stretto.checkpoint.state import State
from stretto.errors import CheckpointError

_MAX_SEAL_BYTES = 256
# What the disk says of a file that is gone, a link, not a file, or on a bad sector. Anything
# else (permissions, too many open files) is about us, not about the checkpoint.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EIO)


def load_newest(folder: Path, *, log: Callable[[str], None]) -> State | None:
    """Return the newest valid state in ``folder``, None when there is none.

    A damaged checkpoint is named through ``log`` and renamed, so that it is tried only once,
    and the one before it is taken. All ranks may call this at the same time.
    """
    try:
        finish_replacements(folder)
        for path in reversed(step_folders(folder)):
            try:
                return _read(path)
            except DamagedError as damage:
                moved = quarantine(path)
                log(f"{damage}; moved aside to {moved.name if moved else 'where a peer put it'}")
    except OSError as error:
        raise _unreadable(folder, error) from error
    return None


def load_one(path: Path) -> State:
    """Return the state in the checkpoint ``path``; `CheckpointError` unless every byte is right."""
    try:
        return _read(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def verify(path: Path) -> None:
    """Raise `CheckpointError` unless every file of ``path`` is as it was written.

    Reads all of it, holds one file at a time.
    """
    try:
        for _ in _files(path, _manifest(path)):
            pass
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path) -> State:
    manifest = _manifest(path)
    tensors: dict[str, Tensor] = {}
    for name, data in _files(path, manifest):
        tensors |= unpack(data, manifest.tensors_in(name), where=str(path / name))
    in_order = {name: tensors[name] for name in manifest.tensors}
    return State(step=manifest.step, tensors=in_order, facts=manifest.facts)


def _manifest(path: Path) -> Manifest:
    if path.is_symlink():
        raise DamagedError(f"{path} is a link, a checkpoint is a plain folder")
    where = path / MANIFEST
    data = _read_plain(where, at_most=MAX_MANIFEST_BYTES)
    if _read_plain(path / SEAL, at_most=_MAX_SEAL_BYTES) != seal_of(data):
        raise DamagedError(f"{where} does not have the digest in {SEAL}: one of them changed")
    manifest = decode(data, where=str(where))
    claimed = step_of(path)
    if claimed is not None and claimed != manifest.step:
        raise DamagedError(f"{where} is of step {manifest.step}, its folder says {claimed}")
    odd = {file.name for file in path.iterdir()} ^ {MANIFEST, SEAL, *manifest.files}
    if odd:
        first = sorted(odd)[0]
        raise DamagedError(
            f"{path} lacks the file {first!r}"
            if first in manifest.files
            else f"{path} has a file {first!r} that its manifest does not list"
        )
    return manifest


def _files(path: Path, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """Yield each file's verified bytes; what is parsed later is what was checked here."""
    for name, entry in manifest.files.items():
        data = _read_plain(path / name, at_most=entry.num_bytes)
        _compare(describe_file(data), entry, path / name)
        yield name, data


def _compare(found: FileEntry, expected: FileEntry, where: Path) -> None:
    if found.num_bytes != expected.num_bytes:
        raise DamagedError(
            f"{where} has {found.num_bytes} bytes, {expected.num_bytes} were written"
        )
    if found.xxh3_128 != expected.xxh3_128:
        raise DamagedError(f"{where} has digest {found.xxh3_128}, {expected.xxh3_128} was written")


def _read_plain(path: Path, *, at_most: int) -> bytes:
    """Return a plain file's bytes: no link is followed, no pipe waited for, no giant read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(f"{path} is not a plain file")
            if status.st_size > at_most:
                raise DamagedError(f"{path} has {status.st_size} bytes, at most {at_most} are due")
            with os.fdopen(handle, "rb", closefd=False) as file:
                return file.read(at_most)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in _DAMAGE:
            raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
        raise


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {error}; nothing was moved aside, since the fault may not lie"
        " in the checkpoint: check permissions and limits, then start again"
    )

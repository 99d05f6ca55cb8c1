"""Decoded images of one split, in a mapped file that all ranks of a host share.

Row i holds image i and a digest of it, written after the image and checked on every use: a row
that is absent, half written or damaged is decoded anew. Nobody is in charge: whoever opens the
file first makes room in it, under a lock, and rows that two ranks write are the same bytes.

Note "who may delete a file". A cache in a folder has a shared lock on its file for as long as it
is mapped, so a file that can be locked for oneself is in nobody's use. Whoever opens or deletes
files has the folder locked meanwhile: none is deleted between being opened and being locked.
"""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
import xxhash
from numpy.typing import NDArray

from stretto.data.images.memory import memory_left
from stretto.errors import ConfigError
from stretto.units import format_bytes

DEFAULT_BYTES = 2 * 10**9
_SHARED_MEMORY = Path("/dev/shm")
_LESS_MEMORY = 'lower data.cache_size or set data.cache to "file" or "none"'
_ANOTHER_FOLDER = "set data.cache_folder to a folder on a disk of this host that can be written to"


@dataclass(frozen=True, slots=True)
class Demand:
    """How much a cache should hold."""

    shape: tuple[int, ...]
    """Of the bytes of one image."""
    num_samples: int
    fraction: float
    """This split's part of what all splits may take."""
    limit: int | None
    """Bytes that all splits may take; None takes what is sensible here."""

    @property
    def row_dtype(self) -> np.dtype[np.void]:
        """One row of the file."""
        return np.dtype([("digest", "<u8"), ("pixels", "u1", self.shape)])


class Cache:
    """Rows for samples 0 to ``capacity`` - 1; the others are never kept."""

    def __init__(self, rows: NDArray[np.void]) -> None:
        self.capacity = len(rows)
        self._digests: NDArray[np.uint64] = rows["digest"]
        self._pixels: NDArray[np.uint8] = rows["pixels"]

    def read(self, indices: NDArray[np.int64], into: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy the images that are here to their places in ``into``; return which these are."""
        found = np.zeros(len(indices), dtype=np.bool_)
        for place in np.flatnonzero(indices < self.capacity):
            index = int(indices[place])
            if digest := int(self._digests[index]):
                # Copied, then checked: somebody may be writing the row at this moment.
                into[place] = self._pixels[index]
                found[place] = digest == _digest(into[place], index)
        return found

    def write(self, index: int, image: NDArray[np.uint8]) -> None:
        """Keep ``image``, if there is a row for it."""
        if index < self.capacity:
            self._pixels[index] = image
            self._digests[index] = _digest(image, index)


def open_in_memory(name: str, demand: Demand, meet: Callable[[], None]) -> Cache:
    """Return a cache in memory, the same for all who give this ``name`` and ``meet`` here.

    The file has lost its name before anything is in it: a run that is killed, at whatever moment,
    leaves at most an empty file behind.
    """
    has_memory = os.access(_SHARED_MEMORY, os.W_OK)
    folder = _SHARED_MEMORY if has_memory else Path(tempfile.gettempdir())
    path = folder / f"stretto-{name}"
    with _refused(f"data.cache = 'memory': cannot make room in {folder}", _LESS_MEMORY):
        file = _open(path)
    with file:
        try:
            meet()
        finally:
            path.unlink(missing_ok=True)
        with _refused(f"data.cache = 'memory': cannot make room in {folder}", _LESS_MEMORY):
            with _locked(file.fileno()):
                _make_room(file.fileno(), folder, demand)
            return _map(file, demand)


def open_in_folder(folder: Path, prefix: str, version: str, demand: Demand) -> Cache:
    """Return the cache that is kept in ``folder``; unused ones of other versions give way to it."""
    limit = "free" if demand.limit is None else str(demand.limit)
    path = folder / f"{prefix}-{version}-{limit}"
    with _refused(f"data.cache = 'file': cannot keep images in {folder}", _ANOTHER_FOLDER):
        folder.mkdir(parents=True, exist_ok=True)
        with _opened(folder) as opened, _locked(opened):
            for other in folder.glob(f"{prefix}-*"):
                if other != path:
                    _delete_unless_used(other)
            with _open(path) as file:
                # Kept by the mapping, which holds the file open after us.
                fcntl.flock(file, fcntl.LOCK_SH)
                _make_room(file.fileno(), folder, demand)
                return _map(file, demand)


@contextmanager
def _refused(what: str, advice: str) -> Iterator[None]:
    """Turn an error of the file system into one that names the setting."""
    try:
        yield
    except OSError as wrong:
        raise ConfigError(f"{what}: {wrong.strerror}; {advice}") from wrong


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Give a descriptor of ``folder`` itself."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)


@contextmanager
def _locked(opened: int) -> Iterator[None]:
    fcntl.flock(opened, fcntl.LOCK_EX)
    try:
        yield
    finally:
        # Not left to the end of a file: its mapping keeps it open, and so would the lock.
        fcntl.flock(opened, fcntl.LOCK_UN)


def _open(path: Path, flags: int = os.O_CREAT) -> BinaryIO:
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "r+b")


def _delete_unless_used(path: Path) -> None:
    """Delete the file, unless a cache has it mapped or it is another user's."""
    with suppress(FileNotFoundError, PermissionError, BlockingIOError), _open(path, 0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _map(file: BinaryIO, demand: Demand) -> Cache:
    dtype = demand.row_dtype
    capacity = os.fstat(file.fileno()).st_size // dtype.itemsize
    if not capacity:  # nothing can be mapped
        return Cache(np.empty(0, dtype))
    rows = np.memmap(file, dtype, "r+", shape=(min(capacity, demand.num_samples),))
    return Cache(rows.view(np.ndarray))


def _make_room(file: int, folder: Path, demand: Demand) -> None:
    """Reserve the file's bytes: a full disk must show now, not as a crash at the first write."""
    has = os.fstat(file).st_size
    room = has + _free_bytes(file, folder)
    limit = min(DEFAULT_BYTES, room // 2) if demand.limit is None else demand.limit
    row = demand.row_dtype.itemsize
    wanted = min(demand.num_samples, int(limit * demand.fraction) // row) * row
    if wanted > room:
        where = f"{folder}, in the memory of this job," if folder == _SHARED_MEMORY else folder
        raise ConfigError(
            f"data.cache_size = {format_bytes(limit)}: {where} has room for "
            f"{format_bytes(room)}, and {format_bytes(wanted)} would be needed; lower it"
        )
    if wanted > has:
        os.posix_fallocate(file, 0, wanted)


def _free_bytes(file: int, folder: Path) -> int:
    found = os.fstatvfs(file)
    free = found.f_bavail * found.f_frsize
    if folder == _SHARED_MEMORY:  # it may promise more than the memory there is, or may be used
        free = min(free, int(psutil.virtual_memory().available), memory_left())
    return free


def _digest(image: NDArray[np.uint8], index: int) -> int:
    # The index is in it, so that a row is no other row's; 0 is kept for "absent".
    return xxhash.xxh3_64_intdigest(image.data, seed=index) or 1

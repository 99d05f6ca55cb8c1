"""Cache of decoded images of one split: a memory-mapped file that all ranks of a host share.

Row i holds image i and its digest. The digest is written after the image and checked on every read.
A row that is missing, half written or damaged is decoded again. There is no owner: whichever rank
opens the file first allocates its space, under a lock. Two ranks that write the same row write the
same bytes.

Deleting files: a cache in a folder holds a shared lock on its file while the file is mapped. A file
that can be locked exclusively is therefore unused. The folder is locked while files are opened or
deleted, so no file is deleted between being opened and being locked.
"""

import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
import psutil
import xxhash
from numpy.typing import NDArray

from stretto.errors import ConfigError
from stretto.units import format_bytes


@dataclass(frozen=True, slots=True)
class _CgroupVersion:
    """File names of one version of the control group interface."""

    mount: str
    limit: str
    usage: str
    reclaimable: tuple[str, ...]
    """Keys of memory.stat that count the page cache, which the kernel can reclaim."""


_CGROUP_V1 = _CgroupVersion(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_CGROUP_V2 = _CgroupVersion(
    "sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file")
)


def cgroup_memory_left(root: Path = Path("/")) -> int:
    """Return the bytes that our control groups still allow; `sys.maxsize` without a limit.

    A batch system or a container limits the memory of a group of processes, and only the control
    group shows it. Shared memory counts towards the limit, and a process that exceeds it is killed.
    Limits also apply to all groups below, so every group from ours up to the root is checked. All
    files are looked up below ``root``. A file that is missing or unreadable sets no limit.
    """
    folders = (
        (interface, root / interface.mount / above.relative_to("/"))
        for interface, group in _own_cgroups(root)
        for above in (group, *group.parents)
    )
    return min(
        (_cgroup_bytes_left(folder, interface) for interface, folder in folders),
        default=sys.maxsize,
    )


def _own_cgroups(root: Path) -> Iterator[tuple[_CgroupVersion, PurePosixPath]]:
    """Yield this process's group in each interface version that may limit memory."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            yield _CGROUP_V2, PurePosixPath(group)
        elif "memory" in controllers.split(","):
            yield _CGROUP_V1, PurePosixPath(group)


def _cgroup_bytes_left(folder: Path, interface: _CgroupVersion) -> int:
    """Return the bytes that the limit of the group in ``folder`` itself still allows."""
    limit, usage = (
        _read_text(folder / name).strip() for name in (interface.limit, interface.usage)
    )
    if not (limit.isdecimal() and usage.isdecimal()):  # "max", or a group we cannot see
        return sys.maxsize
    stat = dict(line.split() for line in _read_text(folder / "memory.stat").splitlines())
    reclaimable = sum(int(stat.get(name, 0)) for name in interface.reclaimable)
    return max(int(limit) - max(int(usage) - reclaimable, 0), 0)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux, no such controller, or a group that only the host sees
        return ""


DEFAULT_BYTES = 2 * 10**9
SHARED_MEMORY = Path("/dev/shm")
_LOWER_CACHE_SIZE_HINT = 'lower data.cache_size or set data.cache to "file" or "none"'
_CHOOSE_FOLDER_HINT = (
    "set data.cache_folder to a folder on a disk of this host that can be written to"
)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The size of a cache and the shape of its rows."""

    shape: tuple[int, ...]
    """Shape of the bytes of one image."""
    num_samples: int
    fraction: float
    """This split's fraction of the limit that all splits share."""
    limit: int | None
    """Bytes for all splits together; None: 2 GB, or half of the free space if that is less."""

    @property
    def row_dtype(self) -> np.dtype[np.void]:
        """The type of one row of the file."""
        return np.dtype([("digest", "<u8"), ("pixels", "u1", self.shape)])


class Cache:
    """Rows for samples 0 to ``capacity`` - 1; samples with larger indices are never cached."""

    def __init__(self, rows: NDArray[np.void]) -> None:
        self.capacity = len(rows)
        self._digests: NDArray[np.uint64] = rows["digest"]
        self._pixels: NDArray[np.uint8] = rows["pixels"]

    def read(self, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy the cached images to their rows of ``out``; return a mask of these rows."""
        found = np.zeros(len(indices), dtype=np.bool_)
        for position in np.flatnonzero(indices < self.capacity):
            index = int(indices[position])
            if digest := int(self._digests[index]):
                # Copy first, then check: another rank may be writing this row.
                out[position] = self._pixels[index]
                found[position] = digest == _digest(out[position], index)
        return found

    def write(self, index: int, image: NDArray[np.uint8]) -> None:
        """Store ``image``, if ``index`` has a row."""
        if index < self.capacity:
            self._pixels[index] = image
            self._digests[index] = _digest(image, index)


def open_memory_cache(name: str, spec: CacheSpec, barrier: Callable[[], None]) -> Cache:
    """Return a cache in shared memory, common to all ranks of the host that pass this ``name``.

    All ranks call this together, because it calls ``barrier``. The file is unlinked before it has
    any content, so a run that is killed at any moment leaves at most an empty file behind.
    """
    has_memory = os.access(SHARED_MEMORY, os.W_OK)
    folder = SHARED_MEMORY if has_memory else Path(tempfile.gettempdir())
    path = folder / f"stretto-{name}"
    with _os_error_as_config_error(
        f"data.cache = 'memory': cannot make room in {folder}", _LOWER_CACHE_SIZE_HINT
    ):
        file = _open_file(path)
    with file:
        try:
            barrier()
        finally:
            path.unlink(missing_ok=True)
        with _os_error_as_config_error(
            f"data.cache = 'memory': cannot make room in {folder}", _LOWER_CACHE_SIZE_HINT
        ):
            with _file_lock(file.fileno()):
                _reserve_bytes(file.fileno(), folder, spec)
            return _map_cache_file(file, spec)


def open_folder_cache(folder: Path, prefix: str, version: str, spec: CacheSpec) -> Cache:
    """Return the cache in ``folder``; delete unused files of this ``prefix`` for other versions."""
    limit = "free" if spec.limit is None else str(spec.limit)
    path = folder / f"{prefix}-{version}-{limit}"
    with _os_error_as_config_error(
        f"data.cache = 'file': cannot keep images in {folder}", _CHOOSE_FOLDER_HINT
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with _open_folder(folder) as descriptor, _file_lock(descriptor):
            for other in folder.glob(f"{prefix}-*"):
                if other != path:
                    _delete_unless_used(other)
            with _open_file(path) as file:
                # The mapping keeps the file open, and with it this lock.
                fcntl.flock(file, fcntl.LOCK_SH)
                _reserve_bytes(file.fileno(), folder, spec)
                return _map_cache_file(file, spec)


@contextmanager
def _os_error_as_config_error(what: str, advice: str) -> Iterator[None]:
    """Turn an `OSError` into a `ConfigError` that names the setting."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}; {advice}") from error


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Yield a descriptor of ``folder`` itself."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _file_lock(descriptor: int) -> Iterator[None]:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        # Unlock explicitly: the mapping keeps the file open, so closing would not release it.
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _open_file(path: Path, flags: int = os.O_CREAT) -> BinaryIO:
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "r+b")


def _delete_unless_used(path: Path) -> None:
    """Delete the file, unless it is mapped by a cache or belongs to another user."""
    with suppress(FileNotFoundError, PermissionError, BlockingIOError), _open_file(path, 0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _map_cache_file(file: BinaryIO, spec: CacheSpec) -> Cache:
    dtype = spec.row_dtype
    capacity = os.fstat(file.fileno()).st_size // dtype.itemsize
    if not capacity:  # an empty file cannot be mapped
        return Cache(np.empty(0, dtype))
    rows = np.memmap(file, dtype, "r+", shape=(min(capacity, spec.num_samples),))
    return Cache(rows.view(np.ndarray))


def _reserve_bytes(file: int, folder: Path, spec: CacheSpec) -> None:
    """Allocate the file's bytes now, because on a full disk a later write would crash."""
    file_bytes = os.fstat(file).st_size
    available_bytes = file_bytes + _free_bytes(file, folder)
    limit = min(DEFAULT_BYTES, available_bytes // 2) if spec.limit is None else spec.limit
    row_bytes = spec.row_dtype.itemsize
    needed_bytes = min(spec.num_samples, int(limit * spec.fraction) // row_bytes) * row_bytes
    if needed_bytes > available_bytes:
        where = f"{folder}, in the memory of this job," if folder == SHARED_MEMORY else folder
        raise ConfigError(
            f"data.cache_size = {format_bytes(limit)}: {where} has room for "
            f"{format_bytes(available_bytes)}, and {format_bytes(needed_bytes)} would be needed; "
            "lower it"
        )
    if needed_bytes > file_bytes:
        os.posix_fallocate(file, 0, needed_bytes)


def _free_bytes(file: int, folder: Path) -> int:
    found = os.fstatvfs(file)
    free = found.f_bavail * found.f_frsize
    if folder == SHARED_MEMORY:  # its size may exceed the memory that is free or allowed
        free = min(free, int(psutil.virtual_memory().available), cgroup_memory_left())
    return free


def _digest(image: NDArray[np.uint8], index: int) -> int:
    # The index is the seed, so a digest fits only its own row; 0 means "absent".
    return xxhash.xxh3_64_intdigest(image.data, seed=index) or 1

"""Save and load checkpoints.

A checkpoint is written under a temporary name, flushed to disk and made visible by one rename. A
reader therefore sees only complete checkpoints, at any time and after any crash. There is no
pointer to the latest one that could be stale: folder names and digests are enough.

When loading, every byte is checked against the manifest, and the newest valid checkpoint is used.
"""

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from stretto.checkpoint import tensor_files
from stretto.checkpoint.folders import (
    MANIFEST,
    MANIFEST_DIGEST,
    MAX_STEP,
    clear_leftovers,
    commit,
    discard,
    finish_replacements,
    fsync_folder,
    quarantine,
    refuse_stale,
    staging_path,
    step_folder_name,
    step_folders,
    step_of,
    write_durably,
)
from stretto.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    SCHEMA_VERSION,
    CheckpointState,
    DamagedCheckpointError,
    FileEntry,
    Manifest,
    SaveResult,
    TensorEntry,
    decode_manifest,
    encode_manifest,
    manifest_digest_line,
    to_plain_json,
)
from stretto.checkpoint.tensor_files import describe_file, unpack_tensors
from stretto.errors import CheckpointError

_MAX_MANIFEST_DIGEST_BYTES = 256
# Errors of a file that is missing, a link, not a file, or on a bad sector. All others
# (permissions, too many open files) say nothing about the checkpoint.
_DAMAGE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EIO)


def load_newest(folder: Path, *, log: Callable[[str], None]) -> CheckpointState | None:
    """Return the newest valid state in ``folder``, None when there is none.

    A damaged checkpoint is reported to ``log`` and renamed, so that it is tried only once. The one
    before it is then tried. All ranks may call this at the same time.
    """
    try:
        finish_replacements(folder)
        for path in reversed(step_folders(folder)):
            try:
                return _read_checkpoint(path)
            except DamagedCheckpointError as damage:
                moved = quarantine(path)
                log(f"{damage}; renamed {f'to {moved.name}' if moved else 'by another rank'}")
    except OSError as error:
        raise _unreadable_error(folder, error) from error
    return None


def load_checkpoint(path: Path) -> CheckpointState:
    """Return the state in the checkpoint ``path``; raise `CheckpointError` if it is damaged."""
    try:
        return _read_checkpoint(path)
    except OSError as error:
        raise _unreadable_error(path, error) from error


def verify_checkpoint(path: Path) -> None:
    """Raise `CheckpointError` unless every file of ``path`` is as it was written.

    Reads all files, one at a time, so that only one is in memory.
    """
    try:
        for _ in _read_files(path, _read_manifest(path)):
            pass
    except OSError as error:
        raise _unreadable_error(path, error) from error


def _read_checkpoint(path: Path) -> CheckpointState:
    manifest = _read_manifest(path)
    tensors: dict[str, Tensor] = {}
    for name, data in _read_files(path, manifest):
        tensors |= unpack_tensors(data, manifest.tensors_in(name), where=str(path / name))
    in_order = {name: tensors[name] for name in manifest.tensors}
    return CheckpointState(step=manifest.step, tensors=in_order, facts=manifest.facts)


def _read_manifest(path: Path) -> Manifest:
    if path.is_symlink():
        raise DamagedCheckpointError(f"{path} is a link, a checkpoint is a plain folder")
    where = path / MANIFEST
    data = _read_regular_file(where, at_most=MAX_MANIFEST_BYTES)
    if _read_regular_file(
        path / MANIFEST_DIGEST, at_most=_MAX_MANIFEST_DIGEST_BYTES
    ) != manifest_digest_line(data):
        raise DamagedCheckpointError(
            f"{where} does not have the digest in {MANIFEST_DIGEST}: one of them changed"
        )
    manifest = decode_manifest(data, where=str(where))
    named_step = step_of(path)
    if named_step is not None and named_step != manifest.step:
        raise DamagedCheckpointError(
            f"{where} is of step {manifest.step}, its folder says {named_step}"
        )
    unexpected = {file.name for file in path.iterdir()} ^ {
        MANIFEST,
        MANIFEST_DIGEST,
        *manifest.files,
    }
    if unexpected:
        first = sorted(unexpected)[0]
        raise DamagedCheckpointError(
            f"{path} lacks the file {first!r}"
            if first in manifest.files
            else f"{path} has a file {first!r} that its manifest does not list"
        )
    return manifest


def _read_files(path: Path, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    """Yield each file's name and verified bytes; callers parse exactly these bytes."""
    for name, entry in manifest.files.items():
        data = _read_regular_file(path / name, at_most=entry.num_bytes)
        _check_file_entry(describe_file(data), entry, path / name)
        yield name, data


def _check_file_entry(found: FileEntry, expected: FileEntry, where: Path) -> None:
    if found.num_bytes != expected.num_bytes:
        raise DamagedCheckpointError(
            f"{where} has {found.num_bytes} bytes, {expected.num_bytes} were written"
        )
    if found.xxh3_128 != expected.xxh3_128:
        raise DamagedCheckpointError(
            f"{where} has digest {found.xxh3_128}, {expected.xxh3_128} was written"
        )


def _read_regular_file(path: Path, *, at_most: int) -> bytes:
    """Return a plain file's bytes; do not follow links, wait for pipes or exceed ``at_most``."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedCheckpointError(f"{path} is not a plain file")
            if status.st_size > at_most:
                raise DamagedCheckpointError(
                    f"{path} has {status.st_size} bytes, at most {at_most} are due"
                )
            with os.fdopen(fd, "rb", closefd=False) as file:
                return file.read(at_most)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _DAMAGE_ERRNOS:
            raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from None
        raise


def _unreadable_error(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {error}; nothing was renamed, since the fault may not lie"
        " in the checkpoint: check permissions and limits, then start again"
    )


def find_and_load(location: Path, *, log: Callable[[str], None]) -> tuple[Path, CheckpointState]:
    """Find and load another run's checkpoint, and change nothing in its folder.

    Returns the path of the checkpoint and its state. ``location`` may be the folder of one
    checkpoint. It may also be a run's folder or its folder of checkpoints; the newest valid one is
    then used. A damaged one is reported to ``log`` and skipped but not renamed, because its own run
    may be active.
    """
    if step_of(location) is not None:
        return location, load_checkpoint(location)
    found = _find_step_folders(location)
    for path in reversed(found):
        try:
            return path, load_checkpoint(path)
        except DamagedCheckpointError as damage:
            log(f"{damage}; skipped")
    raise CheckpointError(f"none of the {len(found)} checkpoints in {location} is valid")


def _find_step_folders(location: Path) -> list[Path]:
    """Return the checkpoints of a run's folder or of a folder of checkpoints, oldest first."""
    inner = location / "checkpoints"
    try:
        found = step_folders(inner if inner.is_dir() else location)
    except OSError as failure:
        raise CheckpointError(f"{location} cannot be read: {failure.strerror}") from failure
    if not found:
        reason = "holds no checkpoint" if location.is_dir() else "is not a folder"
        raise CheckpointError(
            f"{location} {reason}: name a run's folder, its folder checkpoints, or one "
            "step-00000000 in there"
        )
    return found


_BYTES_PER_TENSOR = 512
"""Header and manifest bytes per tensor, without its name, which is in both."""
_OVERHEAD_BYTES = 64 * 1024
"""For the folder, the rest of the manifest, and rounding up to disk blocks."""


def save_checkpoint(
    folder: Path, state: CheckpointState, *, generation: int, keep: int = 2
) -> SaveResult:
    """Write ``state`` as the checkpoint of its step in ``folder``; return once it is on disk.

    One rank calls this, while all ranks hold equal state. ``folder`` must lie directly in the run
    folder. The run's newest generation must not be larger than ``generation``: this is checked
    before writing and again just before the rename.

    Afterwards the oldest earlier checkpoints are deleted until ``keep`` are left. With ``keep`` of
    at least 2, a valid earlier checkpoint is always among them if there is one; for that,
    checkpoints are read. Checkpoints of later steps are never deleted.
    """
    started_s = time.perf_counter()
    _check_arguments(state, generation, keep)
    refuse_stale(folder.parent, generation)
    final = folder / step_folder_name(state.step)
    staging = staging_path(final, generation)
    try:
        _prepare_folder(folder, state, generation)
        num_bytes = _write_files(staging, state, generation)
        refuse_stale(folder.parent, generation)
        commit(staging, final, generation)
        _prune(folder, state.step, generation=generation, keep=keep)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {state.step} could not be written to {folder}: {error};"
            " earlier checkpoints are untouched"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return SaveResult(path=final, num_bytes=num_bytes, seconds=time.perf_counter() - started_s)


def _check_arguments(state: CheckpointState, generation: int, keep: int) -> None:
    if not 0 <= state.step <= MAX_STEP:
        raise CheckpointError(f"step must be between 0 and {MAX_STEP}, got {state.step}")
    if generation < 0 or keep < 1:
        raise CheckpointError(
            f"generation must be at least 0 and keep at least 1, got {generation} and {keep}"
        )
    tensor_files.refuse_unsupported(state.tensors)


def _prepare_folder(folder: Path, state: CheckpointState, generation: int) -> None:
    """Create the folder, clear what crashes left in it, and refuse when the disk is too full."""
    folder.mkdir(parents=True, exist_ok=True)
    fsync_folder(folder.parent)
    finish_replacements(folder)
    clear_leftovers(folder, generation)
    facts_bytes = len(encode_manifest(_make_manifest(state, generation, {}, {})))
    names_bytes = sum(2 * len(name.encode()) + _BYTES_PER_TENSOR for name in state.tensors)
    tensor_bytes = sum(tensor.nbytes for tensor in state.tensors.values())
    needed_bytes = tensor_bytes + names_bytes + facts_bytes + _OVERHEAD_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"the checkpoint of step {state.step} needs {needed_bytes} bytes, {folder} has"
            f" {free_bytes} free; nothing was written: make room, or put the run"
            " elsewhere (run.folder=...)"
        )


def _write_files(staging: Path, state: CheckpointState, generation: int) -> int:
    """Write every file of the checkpoint into the new folder ``staging``; return their bytes."""
    staging.mkdir()
    files: dict[str, FileEntry] = {}
    entries: dict[str, TensorEntry] = {}
    for name, tensors in tensor_files.split_into_files(state.tensors, tensor_files.MAX_FILE_BYTES):
        data = tensor_files.pack_tensors(tensors)
        # The digest is of the bytes in memory, so that it also detects a faulty disk.
        files[name] = tensor_files.describe_file(data)
        entries |= {
            key: tensor_files.describe_tensor(tensor, name) for key, tensor in tensors.items()
        }
        write_durably(staging / name, data)
    manifest = encode_manifest(_make_manifest(state, generation, files, entries))
    digest_line = manifest_digest_line(manifest)
    write_durably(staging / MANIFEST, manifest)
    write_durably(staging / MANIFEST_DIGEST, digest_line)
    fsync_folder(staging)
    return sum(entry.num_bytes for entry in files.values()) + len(manifest) + len(digest_line)


def _make_manifest(
    state: CheckpointState,
    generation: int,
    files: dict[str, FileEntry],
    tensors: dict[str, TensorEntry],
) -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION,
        step=state.step,
        generation=generation,
        facts=to_plain_json(state.facts, where="facts"),
        files=files,
        tensors=tensors,
    )


def _prune(folder: Path, step: int, *, generation: int, keep: int) -> None:
    """Delete the oldest checkpoints before ``step``, but never the last valid one of them."""
    older = [path for path in step_folders(folder) if (step_of(path) or 0) < step]
    num_to_delete = max(0, len(older) - (keep - 1))
    to_delete, kept = older[:num_to_delete], older[num_to_delete:]
    if keep >= 2 and to_delete and not any(_is_valid(path) for path in reversed(kept)):
        last_valid = next((path for path in reversed(to_delete) if _is_valid(path)), None)
        to_delete = [path for path in to_delete if path != last_valid]
    for path in to_delete:
        discard(path, generation)


def _is_valid(path: Path) -> bool:
    try:
        verify_checkpoint(path)
    except CheckpointError:
        return False
    return True

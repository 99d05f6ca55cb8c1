"""Saving: written aside, brought to disk, then made visible by one rename.

Whoever reads the folder, at any instant and after any crash, sees checkpoints that are
complete. There is no pointer to the latest one that could lie: names and digests tell.
"""

import shutil
import time
from pathlib import Path

from stretto.checkpoint import shards
from stretto.checkpoint.generation import refuse_stale
from stretto.checkpoint.layout import (
    MANIFEST,
    MAX_STEP,
    SEAL,
    aside_name,
    clear_leftovers,
    commit,
    discard,
    finish_replacements,
    fsync_folder,
    step_folders,
    step_name,
    step_of,
    write_durably,
)
from stretto.checkpoint.manifest import (
    SCHEMA_VERSION,
    FileEntry,
    Manifest,
    TensorEntry,
    encode,
    plain,
    seal_of,
)
from stretto.checkpoint.reading import verify
from stretto.checkpoint.state import Saved, State
from stretto.errors import CheckpointError

_BYTES_PER_TENSOR = 512
"""Of header and manifest, beside the name, which stands in both."""
_SPARE_BYTES = 64 * 1024
"""For the folder, the manifest's frame and the rounding up to blocks."""


def save(folder: Path, state: State, *, generation: int, keep: int = 2) -> Saved:
    """Write ``state`` as the checkpoint of its step in ``folder`` and return once it is on disk.

    One rank calls this, at a moment when all ranks hold equal state. ``folder`` lies directly
    in the run folder, whose newest generation must not be larger than ``generation``. It is
    asked before writing and again before the rename; what remains is the instant between.

    Steps older than this one are deleted afterwards until ``keep`` are left. With ``keep`` of
    at least 2 one of the older ones is first read whole, and a damaged one does not count.
    Steps later than this one are left alone.
    """
    started_s = time.perf_counter()
    _refuse_impossible(state, generation, keep)
    refuse_stale(folder.parent, generation)
    final = folder / step_name(state.step)
    aside = aside_name(final, generation)
    try:
        _make_room(folder, state, generation)
        num_bytes = _write(aside, state, generation)
        refuse_stale(folder.parent, generation)
        commit(aside, final, generation)
        _prune(folder, state.step, generation=generation, keep=keep)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {state.step} could not be written to {folder}: {error};"
            " earlier checkpoints are untouched"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Saved(path=final, num_bytes=num_bytes, seconds=time.perf_counter() - started_s)


def _refuse_impossible(state: State, generation: int, keep: int) -> None:
    if not 0 <= state.step <= MAX_STEP:
        raise CheckpointError(f"step must be between 0 and {MAX_STEP}, got {state.step}")
    if generation < 0 or keep < 1:
        raise CheckpointError(
            f"generation must be at least 0 and keep at least 1, got {generation} and {keep}"
        )
    shards.refuse_unsupported(state.tensors)


def _make_room(folder: Path, state: State, generation: int) -> None:
    """Create the folder, clear what crashes left in it, and refuse when the disk is too full."""
    folder.mkdir(parents=True, exist_ok=True)
    fsync_folder(folder.parent)
    finish_replacements(folder)
    clear_leftovers(folder, generation)
    facts_bytes = len(encode(_manifest(state, generation, {}, {})))
    names_bytes = sum(2 * len(name.encode()) + _BYTES_PER_TENSOR for name in state.tensors)
    tensor_bytes = sum(tensor.nbytes for tensor in state.tensors.values())
    needed_bytes = tensor_bytes + names_bytes + facts_bytes + _SPARE_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"the checkpoint of step {state.step} needs {needed_bytes} bytes, {folder} has"
            f" {free_bytes} free; nothing was written: make room, or put the run"
            " elsewhere (run.folder=...)"
        )


def _write(aside: Path, state: State, generation: int) -> int:
    """Write every file of the checkpoint into the new folder ``aside``; return their bytes."""
    aside.mkdir()
    files: dict[str, FileEntry] = {}
    entries: dict[str, TensorEntry] = {}
    for name, tensors in shards.split(state.tensors, shards.MAX_FILE_BYTES):
        data = shards.pack(tensors)
        # The digest is of the bytes in memory, so that it also tells of a disk that lies.
        files[name] = shards.describe_file(data)
        entries |= {key: shards.describe_tensor(tensor, name) for key, tensor in tensors.items()}
        write_durably(aside / name, data)
    manifest = encode(_manifest(state, generation, files, entries))
    seal = seal_of(manifest)
    write_durably(aside / MANIFEST, manifest)
    write_durably(aside / SEAL, seal)
    fsync_folder(aside)
    return sum(entry.num_bytes for entry in files.values()) + len(manifest) + len(seal)


def _manifest(
    state: State,
    generation: int,
    files: dict[str, FileEntry],
    tensors: dict[str, TensorEntry],
) -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION,
        step=state.step,
        generation=generation,
        facts=plain(state.facts, where="facts"),
        files=files,
        tensors=tensors,
    )


def _prune(folder: Path, step: int, *, generation: int, keep: int) -> None:
    """Delete the oldest checkpoints before ``step``, but never the last valid one of them."""
    older = [path for path in step_folders(folder) if (step_of(path) or 0) < step]
    num_doomed = max(0, len(older) - (keep - 1))
    doomed, kept = older[:num_doomed], older[num_doomed:]
    if keep >= 2 and doomed and not any(_is_valid(path) for path in reversed(kept)):
        spared = next((path for path in reversed(doomed) if _is_valid(path)), None)
        doomed = [path for path in doomed if path != spared]
    for path in doomed:
        discard(path, generation)


def _is_valid(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True

"""Another run's checkpoint, found and read; its folder is left exactly as it is."""

from collections.abc import Callable
from pathlib import Path

from stretto.checkpoint.layout import step_folders, step_of
from stretto.checkpoint.manifest import DamagedError
from stretto.checkpoint.reading import load_one
from stretto.checkpoint.state import State
from stretto.errors import CheckpointError


def load_at(place: Path, *, log: Callable[[str], None]) -> tuple[Path, State]:
    """Return the checkpoint that ``place`` means, and where it lies.

    A run's folder or its folder of checkpoints means the newest valid one in it; a damaged one
    is named through ``log`` and passed over, not moved: its own run may be at work there. The
    folder of one checkpoint means that one and no other.
    """
    if step_of(place) is not None:
        return place, load_one(place)
    found = _candidates(place)
    for path in reversed(found):
        try:
            return path, load_one(path)
        except DamagedError as damage:
            log(f"{damage}; passed over")
    raise CheckpointError(f"none of the {len(found)} checkpoints in {place} is valid")


def _candidates(place: Path) -> list[Path]:
    """Return the checkpoints of a run's folder or of a folder of checkpoints, oldest first."""
    inner = place / "checkpoints"
    try:
        found = step_folders(inner if inner.is_dir() else place)
    except OSError as failure:
        raise CheckpointError(f"{place} cannot be read: {failure.strerror}") from failure
    if not found:
        reason = "holds no checkpoint" if place.is_dir() else "is not a folder"
        raise CheckpointError(
            f"{place} {reason}: name a run's folder, its folder checkpoints, or one "
            "step-00000000 in there"
        )
    return found

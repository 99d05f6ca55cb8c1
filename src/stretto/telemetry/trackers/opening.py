"""What every tracker is opened with, and the name under which a resumed run is found again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.telemetry.aside import write_aside


@dataclass(frozen=True, slots=True)
class Opening:
    """A run about to be tracked."""

    run_dir: Path
    run: str
    """What people call it."""
    settings: Mapping[str, object]
    """Every setting by dotted key."""
    resumed: bool


def kept_id(opening: Opening, tracker: str) -> str | None:
    """Return the id under which ``tracker`` knows the run that is resumed; None for a new one."""
    path = _path(opening, tracker)
    return path.read_text().strip() if opening.resumed and path.exists() else None


def keep_id(opening: Opening, tracker: str, run_id: str) -> None:
    """Remember ``run_id`` for the day the run is resumed."""
    write_aside(_path(opening, tracker), run_id + "\n")


def _path(opening: Opening, tracker: str) -> Path:
    return opening.run_dir / "trackers" / f"{tracker}.id"

"""The whole examination, kept within its time.

All of it runs in a thread that can be left behind: a disk on a dead server or a store that is
stopped blocks whoever asks, and no time-out of ours reaches there. What was known by then is told.
"""

import threading
import time
from dataclasses import dataclass, field

from stretto.cluster.address import with_address
from stretto.cluster.world import World
from stretto.doctor.attend import AFTER_ROLL_S, attend, join
from stretto.doctor.facts import gather
from stretto.doctor.records import Examination, Facts, Purpose
from stretto.errors import LaunchError

SLACK_S = 1.0
"""Between the last deadline of the examining thread and the moment it is left behind."""


@dataclass(slots=True)
class _Notes:
    """What the examining thread has found so far."""

    doing: str = "before it began"
    facts: Facts | None = None
    result: Examination | None = None
    failure: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def now(self, doing: str) -> None:
        self.doing = doing


def examine(world: World, why: str, purpose: Purpose, patience_s: float) -> Examination | None:
    """Examine this rank and its peers; return everything on the speaker, None on the others.

    All ranks of ``world`` call it together. The speaker is the lowest rank that came.

    Args:
        world: who we are.
        why: what showed the launcher.
        purpose: what the run will need.
        patience_s: how long to wait for the others; the rest is done in a few seconds.

    Raises:
        LaunchError: This rank could not take part, and is not rank 0, which tells it as a finding.
    """
    notes = _Notes()
    thread = threading.Thread(
        target=_work,
        args=(notes, world, why, purpose, patience_s),
        name="stretto-doctor",
        daemon=True,
    )
    thread.start()
    ended = notes.done.wait(patience_s + AFTER_ROLL_S + SLACK_S)
    failure = notes.failure if ended else _stuck(world, notes.doing)
    if failure is None:
        return notes.result
    if world.rank == 0 and notes.facts is not None and isinstance(failure, LaunchError):
        return Examination(purpose, world.size, 0, {0: notes.facts}, trouble=str(failure))
    raise failure


def _work(notes: _Notes, world: World, why: str, purpose: Purpose, patience_s: float) -> None:
    try:
        _look(notes, world, why, purpose, time.monotonic() + patience_s)
    except RuntimeError as lost:  # what torch's store raises
        first_line = str(lost).partition("\n")[0]
        notes.failure = LaunchError(
            f"rank {world.rank} lost the store while {notes.doing}: {first_line}; did the process "
            "that holds it end?"
        )
    except Exception as failure:  # noqa: BLE001 - handed to the caller's thread, which raises it
        notes.failure = failure
    finally:
        notes.done.set()


def _look(notes: _Notes, world: World, why: str, purpose: Purpose, deadline_s: float) -> None:
    """Look at this machine, whatever else is wrong; then meet the others."""
    world, nameless = _addressed(world)
    notes.facts = gather(world, why, purpose, note=notes.now)
    if nameless is not None:
        raise nameless
    notes.now("joining the store")
    board = join(world, notes.facts, deadline_s)
    notes.now("meeting the others on the store")
    notes.result = attend(board, world, notes.facts, purpose, deadline_s)


def _addressed(world: World) -> tuple[World, LaunchError | None]:
    """Return a world whose meeting has an address, or the world and why it has none."""
    try:
        return with_address(world), None
    except LaunchError as nameless:
        return world, nameless


def _stuck(world: World, doing: str) -> LaunchError:
    return LaunchError(
        f"rank {world.rank} is stuck while {doing}: look for a process that is stopped (state T in "
        "`ps`) where the store is held, or a disk whose server is gone"
    )

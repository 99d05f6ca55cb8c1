"""Meet on the store: who came, what each has to tell, and what the speaker's clock says.

Note "nobody waits for ever". Every wait here polls until a deadline, and no call asks the store for
a key that may not be there. A store that stops answering altogether still blocks a call: that is
why `stretto.doctor.examine` does all of this in a thread it can leave behind.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch._C._distributed_c10d import PrefixStore, Store

from stretto.doctor.records import Clock
from stretto.errors import LaunchError

POLL_S = 0.03
TICK_S = 0.05
CLOCK_S = 1.0
"""How long the speaker's clock is watched for a tick."""


class Board:
    """Small texts that all ranks can read; a store seen through the doctor's eyes."""

    def __init__(self, store: Store, generation: int) -> None:
        self._store = PrefixStore(f"doctor/{generation}", store)

    def post(self, name: str, text: str) -> None:
        """Put up a text."""
        self._store.set(name, text)

    def first(self, name: str, text: str) -> str:
        """Put up a text unless there is one; return the one that is there now."""
        kept: bytes = self._store.compare_set(name, "", text)
        return kept.decode()

    def has(self, name: str) -> bool:
        """Return whether somebody put up such a text."""
        return bool(self._store.check([name]))

    def read(self, name: str) -> str | None:
        """Return a text, None while it is not there."""
        return self._store.get(name).decode() if self.has(name) else None

    def count(self, name: str, more: int = 1) -> int:
        """Add to a counter; return what it shows then."""
        return int(self._store.add(name, more))


def wait_until(ready: Callable[[], bool], deadline_s: float) -> bool:
    """Poll until ``ready`` or the deadline on the monotonic clock; return which it was."""
    while not ready():
        if time.monotonic() > deadline_s:
            return False
        _pause()
    return True


def call_the_roll(board: Board, rank: int, size: int, deadline_s: float) -> tuple[int, ...]:
    """Return the ranks that came, the same on all of them.

    The roll closes when all are there, or for everybody when the first one's patience ends; so
    all go on at the same moment however far apart they started.

    Raises:
        LaunchError: The roll was closed without this rank.
    """
    board.post(f"here/{rank}", "")
    board.count("came")
    wait_until(lambda: board.has("roll") or board.count("came", 0) >= size, deadline_s)
    came = [other for other in range(size) if board.has(f"here/{other}")]
    roll: list[int] = json.loads(board.read("roll") or board.first("roll", json.dumps(came)))
    if rank not in roll:
        raise LaunchError(
            f"rank {rank} came after the roll of {size} ranks was closed: start all ranks "
            "together, or give them longer with --patience"
        )
    return tuple(roll)


@contextmanager
def ticking(board: Board) -> Iterator[None]:
    """Show this rank's wall clock on the board, anew every TICK_S, while the context lasts."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK_S):
            board.post("clock", repr(time.time()))

    thread = threading.Thread(target=tick, name="stretto-doctor-clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def compare_clocks(board: Board, timeout_s: float = CLOCK_S) -> Clock | None:
    """Return how far our wall clock is ahead of the ticking one; None when it does not tick.

    A tick was set after we began the last look that did not show it and before we ended the first
    that did: our clock at that moment is known to half the time between.
    """
    deadline_s = time.monotonic() + timeout_s
    before, before_s = board.read("clock"), time.time()
    while time.monotonic() < deadline_s:
        began_s = time.time()
        shown = board.read("clock")
        ended_s = time.time()
        if shown is not None and shown != before:
            return _midway(before_s, ended_s, float(shown))
        before_s = began_s
        _pause()
    return None


def share(board: Board, kind: str, rank: int, text: str) -> None:
    """Put up what ``rank`` has to tell of one kind."""
    board.post(f"{kind}/{rank}", text)


def shared(board: Board, kind: str, ranks: Sequence[int], deadline_s: float) -> dict[int, str]:
    """Return what ``ranks`` told of one kind, without those that did not by the deadline."""
    wait_until(lambda: all(board.has(f"{kind}/{rank}") for rank in ranks), deadline_s)
    told = {rank: board.read(f"{kind}/{rank}") for rank in ranks}
    return {rank: text for rank, text in told.items() if text is not None}


def _pause() -> None:
    """Wait a little; not `time.sleep`, which fails where libfaketime moves the wall clock."""
    threading.Event().wait(POLL_S)


def _midway(earliest_s: float, latest_s: float, shown_s: float) -> Clock:
    return Clock((earliest_s + latest_s) / 2 - shown_s, max(0.0, latest_s - earliest_s) / 2)

"""What of many ranks' words is worth a screen: lines that several say become one, floods are cut.

Pure: lines and times go in, lines to show come out. The logs keep every byte; nothing here does.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.telemetry.wording import printable, ranks_in_words

WINDOW_S = 0.5
"""How long a line waits for other ranks that say the same."""
REMEMBERED_S = 10.0
"""How long a line of rank 0 stands for the others': they import, warn and fail seconds apart."""
MOST_REMEMBERED = 1000
FLOOD_S = 5.0
FLOOD_LINES = 100
"""In each FLOOD_S a rank shows this many lines: 20 a second, and a traceback in one piece."""

_FAILED_FIRST = "rank {} failed first: "
_ECHO = re.compile("stretto: " + _FAILED_FIRST.format(r"\d+"))
"""How the line of a rank begins that quotes another: that one says it itself."""


def echo_of(rank: int, reason: str) -> str:
    """Return what a rank says that failed only because ``rank`` did; no screen shows it."""
    return f"{_FAILED_FIRST.format(rank)}{reason}"


@dataclass(slots=True)
class _Line:
    """A line that waits: who has said it, and since when."""

    text: str
    since_s: float
    ranks: set[int]
    is_told: bool = False
    """Rank 0 has shown it meanwhile; it only keeps the place of its ranks now."""


@dataclass(slots=True)
class _Flood:
    """How much a rank has said since ``since_s``."""

    since_s: float = -math.inf
    shown: int = 0
    held_back: int = 0


class Folding:
    """Folds the lines of ranks for a screen; rank 0's pass as they are.

    A line that several ranks say within `WINDOW_S` is shown once, as ``[ranks 1-3] text``. Each
    rank's own lines stay in their order, so that a traceback of three ranks reads as one. What rank
    0 has said is not repeated for the others, nor what a failed rank said for its victims.
    """

    def __init__(self, logs: Mapping[int, str]) -> None:
        self._logs = logs
        """Where all lines of a rank are kept, for the remark that some were held back."""
        self._waiting: list[_Line] = []
        self._floods: dict[int, _Flood] = {}
        self._said: dict[str, float] = {}
        """Rank 0's lines and when it said them last, the oldest first."""

    def feed(self, rank: int, line: str, now_s: float) -> list[str]:
        """Take a line in; return what is to be shown at once, which is rank 0's alone."""
        if rank and self._is_held_back(rank, now_s):
            return []
        text = _left_on_screen(line)
        if _ECHO.match(text):
            return []
        if rank == 0:
            self._remember(text, now_s)
            return [text]
        is_known = now_s - self._said.get(text, -math.inf) < REMEMBERED_S
        if text and not is_known:
            self._floods[rank].shown += 1
            self._join(rank, text, now_s)
        return []

    def due(self, now_s: float) -> list[str]:
        """Return the lines whose time has come; ``math.inf`` brings out all that wait."""
        for rank, flood in self._floods.items():
            if flood.held_back and now_s >= flood.since_s + FLOOD_S:
                self._close(rank, flood, now_s)
        ripe = [i for i, line in enumerate(self._waiting) if line.since_s + WINDOW_S <= now_s]
        # A line's younger predecessors leave with it: they keep their order, and it is not late.
        leaving = max(ripe, default=-1) + 1
        shown, self._waiting = self._waiting[:leaving], self._waiting[leaving:]
        return [f"[{ranks_in_words(line.ranks)}] {line.text}" for line in shown if not line.is_told]

    def next_s(self) -> float:
        """Return when `due` has something next; infinity when nothing waits."""
        lines = (line.since_s + WINDOW_S for line in self._waiting)
        floods = (flood.since_s + FLOOD_S for flood in self._floods.values() if flood.held_back)
        return min((*lines, *floods), default=math.inf)

    def _remember(self, text: str, now_s: float) -> None:
        self._said.pop(text, None)
        self._said[text] = now_s
        if len(self._said) > MOST_REMEMBERED:
            self._said.pop(next(iter(self._said)))
        for line in self._waiting:
            line.is_told |= line.text == text

    def _is_held_back(self, rank: int, now_s: float) -> bool:
        flood = self._floods.setdefault(rank, _Flood())
        if now_s >= flood.since_s + FLOOD_S:
            self._close(rank, flood, now_s)
            flood.since_s, flood.shown = now_s, 0
        if flood.shown == FLOOD_LINES:
            flood.held_back += 1
            return True
        return False

    def _close(self, rank: int, flood: _Flood, now_s: float) -> None:
        if flood.held_back:
            self._join(rank, f"... {flood.held_back:,} more lines in {self._logs[rank]}", now_s)
            flood.held_back = 0

    def _join(self, rank: int, text: str, now_s: float) -> None:
        """Add a rank to a line that waits and is the same, or let its line wait by itself.

        What the rank has said alone since gives way to that line's front, so that its own order
        stays; what it shares with others already cannot.
        """
        waiting = self._waiting
        shared = (i for i, line in enumerate(waiting) if rank in line.ranks and len(line.ranks) > 1)
        first = max(shared, default=-1) + 1
        same = (i for i in range(first, len(waiting)) if waiting[i].text == text)
        place = next((i for i in same if rank not in waiting[i].ranks), None)
        if place is None:
            waiting.append(_Line(text, now_s, {rank}))
            return
        joined = waiting[place]
        waiting[place:] = sorted(waiting[place:], key=lambda line: rank not in line.ranks)
        joined.ranks.add(rank)


def _left_on_screen(line: str) -> str:
    """Return what a terminal would be left with: progress bars write over themselves."""
    return printable(line.rstrip("\r").rsplit("\r", 1)[-1].rstrip())

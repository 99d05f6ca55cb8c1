"""Beats on the side: every rank tells the store each second that it lives, and watches another.

A thread and a connection of its own, so that a rank that waits in a collective still beats. Each
rank watches the one before it; when that one falls silent, all are looked at, so that a whole
host that hangs is named as such. Only differences on one's own monotonic clock are used.

A rank that is silent for a while is named; one that is silent for ``silence_s`` is given up: the
verdict goes to the store, and every rank ends, because none can leave a collective by itself. A
rank also ends when the store is gone: with it went whoever would end it.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from torch._C._distributed_c10d import PrefixStore, Store

from stretto.cluster.world import World
from stretto.telemetry.wording import ranks_in_words

BEAT_S = 1.0
NAMED_AFTER_S = 4.0
"""Silence after which a rank is named: four missed beats."""
_LAST_WORDS_S = 2.0
"""Between a verdict and our own end: a rank that can fail by itself tells more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who broke the run, and how; the first one left in the store counts."""

    rank: int
    reason: str
    kind: Literal["failed", "silent"]


def leave_verdict(store: Store, generation: int, verdict: Verdict) -> Verdict:
    """Leave a verdict unless there is one; return the one that counts."""
    kept = _life(store, generation).compare_set("verdict", "", json.dumps(asdict(verdict)))
    return Verdict(**json.loads(kept))


def read_verdict(store: Store, generation: int = 0) -> Verdict | None:
    """Return what a rank left, without waiting."""
    life = _life(store, generation)
    if not life.check(["verdict"]):
        return None
    return Verdict(**json.loads(life.get("verdict")))


def _life(store: Store, generation: int) -> Store:
    return PrefixStore(f"life/{generation}", store)


class Pulse:
    """The beating thread of one rank; `start` it when all ranks have met, `stop` it at the end."""

    def __init__(
        self, store: Store, world: World, silence_s: float, say: Callable[[str], None]
    ) -> None:
        self._store = _life(store, world.generation)
        self._root = store
        self._world = world
        self._silence_s = silence_s
        self._say = say
        self.step = 0
        """Where this rank is; written by the loop, told with each beat."""
        held_by_rank_0 = world.meeting is not None and world.meeting.held_by_rank_0
        self._holder = "rank 0" if held_by_rank_0 else "the launcher"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="stretto-beats", daemon=True)
        self._tell(0)

    def start(self) -> None:
        """Begin; by now every rank has made its own pulse, and so has told once that it lives."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; nobody is blamed for what comes after."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _tell(self, count: int) -> None:
        self._store.set(f"beat/{self._world.rank}", f"{count} {self.step}")

    def _beat(self) -> None:
        watch = Watch(self._world.rank, self._world.size, self._silence_s)
        count = 0
        try:
            while not self._over.wait(BEAT_S):
                count += 1
                self._tell(count)
                self._listen(watch)
        except RuntimeError:
            if not self._over.is_set():
                self._leave(f"{self._holder} is gone (its store does not answer): ending too")

    def _listen(self, watch: "Watch") -> None:
        asked = watch.asks()
        heard = self._store.multi_get([f"beat/{rank}" for rank in asked])
        told = watch.hear(dict(zip(asked, map(bytes.decode, heard), strict=True)), time.monotonic())
        for line in told.lines:
            self._tell_people(line)
        if told.verdict is not None:
            leave_verdict(self._root, self._world.generation, told.verdict)
        if self._store.check(["verdict"]) and not self._over.wait(_LAST_WORDS_S):
            kept = read_verdict(self._root, self._world.generation)
            self._leave(kept.reason if kept else "another rank failed")

    def _tell_people(self, line: str) -> None:
        # Whoever read what we say may be gone: that is one reason to be here.
        with suppress(OSError, ValueError):
            self._say(line)

    def _leave(self, why: str) -> None:
        """End this process from a side thread: its main thread may be stuck for good."""
        try:
            self._tell_people(why)
        finally:
            os._exit(1)


@dataclass(frozen=True, slots=True)
class Told:
    """What a look at the others gave."""

    lines: tuple[str, ...] = ()
    verdict: Verdict | None = None


class Watch:
    """Judges beats, without a thread and without a clock: both are given."""

    def __init__(self, rank: int, size: int, silence_s: float) -> None:
        self._before = (rank - 1) % size
        self._others = [other for other in range(size) if other != rank]
        self._silence_s = silence_s
        self._looked_s: float | None = None
        self._beats: dict[int, tuple[str, float]] = {}
        """Rank -> its last beat, and when we first saw it."""
        self._named: tuple[int, ...] = ()

    def asks(self) -> list[int]:
        """Return whose beats to fetch: one, or all as soon as that one is late."""
        if not self._others:
            return []
        late = self._looked_s is not None and self._silent_for(self._before) > 1.5 * BEAT_S
        return self._others if late or self._named else [self._before]

    def hear(self, beats: dict[int, str], now_s: float) -> Told:
        """Take beats; return what is to be said, and a verdict once patience is over."""
        away = self._looked_s is not None and now_s - self._looked_s > 3 * BEAT_S
        self._looked_s = now_s
        if away:  # it was us who did not look: nobody can be called silent for that
            self._beats.clear()
        for rank, beat in beats.items():
            if self._beats.get(rank, ("", 0.0))[0] != beat:
                self._beats[rank] = (beat, now_s)
        return self._judge()

    def _silent_for(self, rank: int) -> float:
        assert self._looked_s is not None
        return self._looked_s - self._beats[rank][1] if rank in self._beats else 0.0

    def _judge(self) -> Told:
        longest_s = self._silent_for(self._before)
        if longest_s < NAMED_AFTER_S:
            back = self._named
            self._named = ()
            return Told((f"{ranks_in_words(back)}: heard of again",) if back else ())
        silent = tuple(r for r in self._beats if self._silent_for(r) >= 2 * BEAT_S)
        step = self._beats[self._before][0].split()[1]
        told = f"silent for {longest_s:.0f} s, last heard of at step {step}"
        if longest_s >= self._silence_s:
            reason = f"{ranks_in_words(silent)} {told}: given up (run.silence_s)"
            return Told(verdict=Verdict(self._before, reason, "silent"))
        if silent == self._named:
            return Told()
        self._named = silent
        return Told((f"{ranks_in_words(silent)} {told}; the others wait",))

"""How many messages follow one another: what latency multiplies, whatever the bytes.

Counted as the papers do: a rank sends one and receives one message at a time, each takes one unit.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from stretto.comm.schedule import Schedule
from stretto.sim.charge import edges
from stretto.sim.engine import run
from stretto.sim.outline import Outline, outline, representatives
from stretto.sim.tasks import Tasks


def serial_steps(schedule: Schedule) -> int:
    """Return the number of messages on the longest chain in which each waits for the one before.

    Where ranks have several messages at once they take them in the order of their programs, as
    soon as both ends are free: a count for comparing algorithms, not the least there could be.
    """
    laid = outline(schedule, representatives(schedule, None))
    if not len(laid.messages):
        return 0
    return _unhindered(laid) if _one_at_a_time(laid) else _Ports(laid).run()


def _one_at_a_time(laid: Outline) -> bool:
    """Whether no rank ever has two messages to send, or two to receive, at once."""
    rounds, messages = laid.rounds, laid.messages
    chained = np.unique(rounds.later[rounds.earlier == rounds.later - 1])
    first = np.unique(rounds.rank, return_index=True)[1]
    once = len(chained) == len(rounds) - len(first)
    ends = (messages.source, messages.target)
    return once and all(np.bincount(end).max(initial=0) <= 1 for end in ends)


def _unhindered(laid: Outline) -> int:
    """Nobody is ever in another's way: the longest path."""
    num, joins = len(laid.messages), len(laid.rounds)
    earlier, later = edges(laid.messages, laid.rounds)
    delay = np.concatenate([np.ones(num), np.zeros(joins)])
    nothing = np.zeros((num + joins, 1))
    tasks = Tasks(
        delay, np.zeros(num + joins), nothing.astype(np.int64), nothing, earlier, later, 1
    )
    return round(run(tasks).seconds)


@dataclass(order=True, slots=True)
class _Letter:
    """A message both of whose ends are there, in the order in which they are taken."""

    posted: int
    turn: int
    index: int
    gone: bool = field(default=False, compare=False)


class _Ports:
    """Messages that queue for their sender's way out and their receiver's way in."""

    def __init__(self, laid: Outline) -> None:
        messages, rounds = laid.messages, laid.rounds
        self._ends = list(zip(messages.source.tolist(), messages.target.tolist(), strict=True))
        self._rank = rounds.rank.tolist()
        self._awaits = np.bincount(rounds.later, minlength=len(rounds)).tolist()
        self._after: dict[int, list[int]] = defaultdict(list)
        for earlier, later in zip(rounds.earlier.tolist(), rounds.later.tolist(), strict=True):
            self._after[earlier].append(later)
        self._of: dict[int, list[int]] = defaultdict(list)
        for index, ends in enumerate(self._ends):
            for end in ends:
                self._of[end].append(index)
        self._left = {end: len(indices) for end, indices in self._of.items()}
        self._missing = [2] * len(self._ends)
        self._queues: dict[tuple[str, int], list[_Letter]] = defaultdict(list)
        self._busy: set[tuple[str, int]] = set()

    def run(self) -> int:
        now = 0
        flying: list[int] = []
        self._open([r for r, n in enumerate(self._awaits) if not n], now)
        ports = set(self._queues)
        while True:
            flying = self._take_off(sorted(ports))
            if not flying:
                return now
            now += 1
            ports = self._land(flying, now)

    def _open(self, rounds: list[int], now: int) -> set[tuple[str, int]]:
        """Start ``rounds``, and those that follow empty ones; return the ports with new letters."""
        touched: set[tuple[str, int]] = set()
        while rounds:
            begun = rounds.pop()
            if begun not in self._of:
                rounds += self._finish(begun)
            for index in self._of.get(begun, ()):
                self._missing[index] -= 1
                if not self._missing[index]:
                    letter = _Letter(now, max(self._ends[index]), index)
                    for port in self._ports(index):
                        heapq.heappush(self._queues[port], letter)
                        touched.add(port)
        return touched

    def _finish(self, done: int) -> list[int]:
        """Return the rounds that ``done`` was the last to hold up."""
        free = []
        for later in self._after.get(done, ()):
            self._awaits[later] -= 1
            if not self._awaits[later]:
                free.append(later)
        return free

    def _ports(self, index: int) -> tuple[tuple[str, int], tuple[str, int]]:
        source, target = self._ends[index]
        return ("out", self._rank[source]), ("in", self._rank[target])

    def _take_off(self, ports: list[tuple[str, int]]) -> list[int]:
        """Let the first letter of each of ``ports`` go whose other end is free."""
        flying = []
        for port in ports:
            letter = self._first(port)
            if letter is not None:
                letter.gone = True
                self._busy.update(self._ports(letter.index))
                flying.append(letter.index)
        return flying

    def _first(self, port: tuple[str, int]) -> _Letter | None:
        queue, held = self._queues[port], []
        found = None
        while queue and found is None and port not in self._busy:
            letter = heapq.heappop(queue)
            if letter.gone:
                continue
            if self._busy.isdisjoint(self._ports(letter.index)):
                found = letter
            else:
                held.append(letter)
        for letter in held:
            heapq.heappush(queue, letter)
        return found

    def _land(self, flying: list[int], now: int) -> set[tuple[str, int]]:
        """End all that is under way; return the ports that may have something to do."""
        touched: set[tuple[str, int]] = set()
        free: list[int] = []
        for index in flying:
            touched.update(self._ports(index))
            for end in self._ends[index]:
                self._left[end] -= 1
                if not self._left[end]:
                    free += self._finish(end)
        self._busy.clear()
        return touched | self._open(free, now)

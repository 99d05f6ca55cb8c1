"""How often a sum is rounded on its way, and what that does to it at most.

Let M_i be the largest magnitude of rank i's input in a block, and let no input pass more than d
roundings, each with an error of at most e times the largest magnitude it meets. Then the result is
off by at most ((1 + e)^d - 1) times the sum of all M_i: by induction, what is held after d_i
roundings of each input i is at most the sum of (1 + e)^d_i M_i large, and off by that less the sum
of M_i; adding two such sums keeps this, and one more rounding turns every d_i into d_i + 1.
"""

from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray

from stretto.comm.schedule import Action, Op, Round, Schedule, rounds
from stretto.errors import ScheduleError

Depths = NDArray[np.int64]
"""[chunk, input]: roundings so far; -1 where the input is not in the sum."""
_Routes = defaultdict[tuple[int, int, int], deque[Depths]]


def error_bound(schedule: Schedule, per_hop: float) -> float:
    """Return the largest error of a schedule's sums, over the sum of the ranks' largest magnitudes.

    Both are meant block by block. Additions in fp32 add 2^-24 of that for each rank.
    """
    return float((1 + per_hop) ** roundings(schedule) - 1)


def roundings(schedule: Schedule) -> int:
    """Return how many roundings an input goes through at most; passing on what is rounded is none.

    A ring has n of them, recursive doubling one for each exchange and one at the end.
    """
    routes: _Routes = defaultdict(deque)
    ranks = [_Rank(schedule, rank) for rank in range(schedule.size)]
    while any(rank.go_on(routes) for rank in ranks):
        pass
    if not all(rank.through for rank in ranks):
        raise ScheduleError(f"{schedule.name} for {schedule.size} ranks: nobody can go on")
    return max(rank.seal() for rank in ranks)


class _Rank:
    """One rank on its way through its rounds, with eager sends."""

    def __init__(self, schedule: Schedule, number: int) -> None:
        self._number = number
        self._rounds = rounds(schedule, number)
        self._depths: Depths = np.full((schedule.num_chunks, schedule.size), -1, dtype=np.int64)
        self._depths[:, number] = 0
        self._exact = np.ones(schedule.num_chunks, dtype=np.bool_)
        self._summed = np.zeros(schedule.num_chunks, dtype=np.bool_)
        self._sent: set[int] = set()
        self._done: set[int] = set()

    @property
    def through(self) -> bool:
        return len(self._done) == len(self._rounds)

    def go_on(self, routes: _Routes) -> bool:
        """Start and finish what can be; return whether there was anything."""
        moved = False
        for index, batch in enumerate(self._rounds):
            if index in self._done or not self._may_start(index, batch):
                continue
            if index not in self._sent:
                self._sent.add(index)
                self._send(batch, routes)
                moved = True
            if self._arrived(batch, routes):
                self._receive(batch, routes)
                self._done.add(index)
                moved = True
        return moved

    def seal(self) -> int:
        """Round what was summed and never sent on; return the largest count."""
        self._round(np.flatnonzero(self._summed))
        return int(self._depths.max(initial=0))

    def _may_start(self, index: int, batch: Round) -> bool:
        before = (i for i in range(index) if self._rounds[i].lane == batch.lane)
        return self._done.issuperset(batch.waits) and self._done.issuperset(before)

    def _round(self, chunks: NDArray[np.int64]) -> None:
        chunks = chunks[self._exact[chunks]]
        self._depths[chunks] += self._depths[chunks] >= 0
        self._exact[chunks] = self._summed[chunks] = False

    def _send(self, batch: Round, routes: _Routes) -> None:
        for op in batch.ops:
            if op.action is Action.SEND:
                self._round(np.arange(op.start, op.stop))
                leaving = self._depths[op.start : op.stop].copy()
                routes[self._number, op.peer, op.lane].append(leaving)

    def _arrived(self, batch: Round, routes: _Routes) -> bool:
        wanted: dict[tuple[int, int, int], int] = defaultdict(int)
        for op in _receives(batch):
            wanted[op.peer, self._number, op.lane] += 1
        return all(len(routes[route]) >= count for route, count in wanted.items())

    def _receive(self, batch: Round, routes: _Routes) -> None:
        for op in _receives(batch):
            adds, chunks = op.action is Action.ADD, slice(op.start, op.stop)
            arrived = routes[op.peer, self._number, op.lane].popleft()
            self._depths[chunks] = np.maximum(self._depths[chunks], arrived) if adds else arrived
            self._exact[chunks] = self._summed[chunks] = adds


def _receives(batch: Round) -> list[Op]:
    return [op for op in batch.ops if op.action is not Action.SEND]

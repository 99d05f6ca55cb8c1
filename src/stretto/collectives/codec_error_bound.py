"""Bounds the rounding error of an all-reduce whose messages are encoded before every hop.

Let M_i be the largest magnitude of rank i's input in a block. Let every input pass at most d
roundings, each with an error of at most e times the largest magnitude of the rounded block. Then
the error of the sum is at most ((1 + e)^d - 1) times the sum of all M_i.

Proof by induction: take a partial sum in which input i has been rounded d_i times. Its magnitude is
at most S, the sum of (1 + e)^d_i M_i, and its error at most S minus the sum of M_i. Both bounds
hold for the sum of two such sums. One more rounding turns every d_i into d_i + 1.
"""

from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray

from stretto.collectives.schedule import Action, Op, Round, Schedule, rounds
from stretto.errors import ScheduleError

Depths = NDArray[np.int64]
"""[chunk, input]: roundings so far; -1 where the input is not in the sum."""
_Routes = defaultdict[tuple[int, int, int], deque[Depths]]


def error_bound(schedule: Schedule, per_hop_error: float) -> float:
    """Return the largest error of a block of the sum, relative to the sum of all M_i.

    M_i is the largest magnitude of rank i's input in the block, and ``per_hop_error`` the largest
    relative error of one rounding. Additions in fp32 add another 2^-24 for each rank.
    """
    return float((1 + per_hop_error) ** max_roundings(schedule) - 1)


def max_roundings(schedule: Schedule) -> int:
    """Return how often an input is rounded at most; sending a rounded value on is no rounding.

    A ring rounds n times, recursive doubling once for each exchange and once at the end.

    Raises:
        ScheduleError: The schedule deadlocks.
    """
    routes: _Routes = defaultdict(deque)
    ranks = [_RankDepths(schedule, rank) for rank in range(schedule.size)]
    while any(rank.advance(routes) for rank in ranks):
        pass
    if not all(rank.is_finished for rank in ranks):
        raise ScheduleError(f"{schedule.name} for {schedule.size} ranks: deadlock")
    return max(rank.round_unsent_sums() for rank in ranks)


class _RankDepths:
    """Executes the rounds of one rank, with eager sends, and counts roundings."""

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
    def is_finished(self) -> bool:
        return len(self._done) == len(self._rounds)

    def advance(self, routes: _Routes) -> bool:
        """Start and finish the rounds that can be; return whether there was any progress."""
        has_progressed = False
        for index, round_ in enumerate(self._rounds):
            if index in self._done or not self._may_start(index, round_):
                continue
            if index not in self._sent:
                self._sent.add(index)
                self._send(round_, routes)
                has_progressed = True
            if self._arrived(round_, routes):
                self._receive(round_, routes)
                self._done.add(index)
                has_progressed = True
        return has_progressed

    def round_unsent_sums(self) -> int:
        """Round the sums that were never sent; return the largest number of roundings."""
        self._round(np.flatnonzero(self._summed))
        return int(self._depths.max(initial=0))

    def _may_start(self, index: int, round_: Round) -> bool:
        before = (i for i in range(index) if self._rounds[i].lane == round_.lane)
        return self._done.issuperset(round_.waits_for) and self._done.issuperset(before)

    def _round(self, chunks: NDArray[np.int64]) -> None:
        chunks = chunks[self._exact[chunks]]
        self._depths[chunks] += self._depths[chunks] >= 0
        self._exact[chunks] = self._summed[chunks] = False

    def _send(self, round_: Round, routes: _Routes) -> None:
        for op in round_.ops:
            if op.action is Action.SEND:
                self._round(np.arange(op.start, op.stop))
                outgoing = self._depths[op.start : op.stop].copy()
                routes[self._number, op.peer, op.lane].append(outgoing)

    def _arrived(self, round_: Round, routes: _Routes) -> bool:
        needed_messages: dict[tuple[int, int, int], int] = defaultdict(int)
        for op in _receive_ops(round_):
            needed_messages[op.peer, self._number, op.lane] += 1
        return all(len(routes[route]) >= count for route, count in needed_messages.items())

    def _receive(self, round_: Round, routes: _Routes) -> None:
        for op in _receive_ops(round_):
            is_sum, chunks = op.action is Action.ADD, slice(op.start, op.stop)
            arrived = routes[op.peer, self._number, op.lane].popleft()
            self._depths[chunks] = np.maximum(self._depths[chunks], arrived) if is_sum else arrived
            self._exact[chunks] = self._summed[chunks] = is_sum


def _receive_ops(round_: Round) -> list[Op]:
    return [op for op in round_.ops if op.action is not Action.SEND]

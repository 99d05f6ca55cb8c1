"""How many messages follow one another: what latency multiplies, whatever the bytes.

Counted as the papers do: a rank sends one and receives one message at a time, each takes one unit.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stretto.comm.schedule import Schedule
from stretto.sim.alike import by_program
from stretto.sim.charge import edges
from stretto.sim.engine import run_single
from stretto.sim.outline import Outline, outline
from stretto.sim.tasks import Ints, Tasks, Waits

_WIDE = 64


@lru_cache(maxsize=256)
def serial_steps(schedule: Schedule) -> int:
    """Return the number of messages on the longest chain in which each waits for the one before.

    Where ranks have several messages at once they take them in the order of their programs, as
    soon as both ends are free: a count for comparing algorithms, not the least there could be.
    """
    laid = outline(schedule, by_program(schedule))
    if not len(laid.messages):
        return 0
    return _unhindered(laid) if _is_deep(laid) and _one_at_a_time(laid) else _Ports(laid).run()


def _is_deep(laid: Outline) -> bool:
    """Whether few ranks at a time have something to do: then columns are slower than a loop."""
    deepest = int(np.bincount(laid.rounds.rank).max())
    return len(laid.rounds) < _WIDE * deepest


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
    return round(run_single(tasks).seconds)


class _Ports:
    """Messages that queue for their sender's way out and their receiver's way in."""

    def __init__(self, laid: Outline) -> None:
        messages, rounds = laid.messages, laid.rounds
        self._num, self._num_ranks = len(messages), laid.alike.num_ranks
        self._out, self._into = rounds.rank[messages.source], rounds.rank[messages.target]
        self._turn = np.maximum(messages.source, messages.target)
        earlier, later = edges(messages, rounds)
        self._waits = Waits(earlier, later, self._num + len(rounds))

    def run(self) -> int:
        """Return how many units of time pass until all have arrived."""
        now, queue = 0, self._posted(self._waits.over())
        while queue.size:
            now += 1
            goes = self._go(queue)
            posted = self._posted(self._waits.release(queue[goes]))
            queue = np.concatenate([queue[~goes], posted])
        return now

    def _posted(self, free: Ints) -> Ints:
        """Return the messages that can go now, as they queue; ends of rounds take no time."""
        found = [free[:0]]
        while free.size:
            found.append(free[free < self._num])
            free = self._waits.release(free[free >= self._num])
        new = np.concatenate(found)
        return new[np.lexsort((new, self._turn[new]))]

    def _go(self, queue: Ints) -> NDArray[np.bool_]:
        """Return which of ``queue`` go: each in turn, if both its ports are still free."""
        out, into = self._out[queue], self._into[queue]
        goes, left = np.zeros(len(queue), dtype=np.bool_), np.arange(len(queue))
        while left.size:
            firsts = (_first(port[left], self._num_ranks) for port in (out, into))
            now = left[np.logical_and(*firsts)]
            goes[now] = True
            left = left[~_among(out[left], out[now], self._num_ranks)]
            left = left[~_among(into[left], into[now], self._num_ranks)]
        return goes


def _first(port: Ints, num_ports: int) -> NDArray[np.bool_]:
    """Return which of them are the first of their port."""
    first = np.full(num_ports, len(port))
    first[port[::-1]] = np.arange(len(port))[::-1]
    result: NDArray[np.bool_] = first[port] == np.arange(len(port))
    return result


def _among(port: Ints, taken: Ints, num_ports: int) -> NDArray[np.bool_]:
    """Return which of ``port`` are taken."""
    is_taken = np.zeros(num_ports, dtype=np.bool_)
    is_taken[taken] = True
    return is_taken[port]

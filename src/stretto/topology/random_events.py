"""Who averages with whom where nobody waits for a round, and orders in which it may come about.

Ranks are active (even) or passive (odd): an active one goes to a passive one, which answers at any
time. Two that go to each other would wait for each other, and so would a circle of them; between
two kinds there is none (AD-PSGD, Lian et al., 2018, arXiv:1710.06952).

A real run has the order in which messages arrive. Tests and virtual workers, which want one that
can be had again, take `random_events`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from stretto.topology import keyed

_ORDER = -1
"""Stands for the segment, in draws of an order; less the first step, where there is one before: no
rank has such a number."""
_BLOCK = 256
"""Words drawn at once."""


class Act(StrEnum):
    """What a worker does at one moment, undisturbed by others."""

    READ = "read"
    """Begins a step: its gradient will be that of the model as it is now."""
    APPLY = "apply"
    """Ends the step: its gradient changes the model as it is now."""
    AVERAGE = "average"
    """Makes its model and a peer's the mean of the two, some time after a step."""


class Event(NamedTuple):
    """One act of one worker."""

    act: Act
    worker: int
    step: int
    """The worker's own, from 0 on."""
    peer: int
    """With whom it averages; else the worker itself."""


def is_active(rank: int) -> bool:
    """Say whether a rank goes to others, or waits for them to come."""
    return rank % 2 == 0


def passive_ranks(size: int) -> range:
    """Return the ranks that answer."""
    return range(1, size, 2)


def active_ranks(size: int) -> range:
    """Return the ranks that go to others."""
    return range(0, size, 2)


def passive_peer(rank: int, size: int, step: int, seed: int = 0) -> int | None:
    """Return to whom ``rank`` goes after ``step``: each as likely; None where it goes to nobody.

    Drawn by (seed, step, rank), so that a run which is resumed goes on to the same peers.
    """
    passive = passive_ranks(size)
    if not is_active(rank) or not passive:
        return None
    (word,) = keyed.words(1, seed=seed, step=step, segment=rank)
    return passive[keyed.below(len(passive), word)]


def random_events(
    size: int,
    steps: int,
    seed: int = 0,
    paces: Sequence[int] | None = None,
    *,
    first: int = 0,
    ahead: int | None = None,
) -> Iterator[Event]:
    """Yield what ``size`` workers do in ``steps`` steps each, in an order drawn by the seed.

    Any order is possible that real ranks may come to: a worker reads, applies, and reads again;
    an active one averages once after each step, beside the next one at the latest. ``paces`` say
    how often each worker is drawn, compared with others: one of a low pace is slow. Workers have
    met before step ``first``; none begins a step ``ahead`` of what the slowest begins.
    """
    workers = [_Worker(rank, size, first + steps, seed, *[first] * 3) for rank in range(size)]
    weights = paces or [1] * size
    words = _words(seed, first)
    while True:
        may_not_begin = None if ahead is None else min(worker.read for worker in workers) + ahead
        choices = [(worker, act) for worker in workers for act in worker.acts(may_not_begin)]
        if not choices:
            return
        place = keyed.below(sum(weights[worker.rank] for worker, _ in choices), next(words))
        for worker, act in choices:
            place -= weights[worker.rank]
            if place < 0:
                yield worker.do(act)
                break


@dataclass(slots=True)
class _Worker:
    """How far a worker is: steps read, applied, and averaged after."""

    rank: int
    size: int
    end: int
    """The step that it does not begin any more."""
    seed: int
    read: int
    applied: int
    averaged: int

    def acts(self, may_not_begin: int | None) -> list[Act]:
        """Return what it may do next; one step and those after it may not begin yet."""
        averages = is_active(self.rank) and len(passive_ranks(self.size)) > 0
        acts = []
        if self.read > self.applied:
            acts.append(Act.APPLY)
        elif self.read not in (self.end, may_not_begin) and not (
            averages and self.averaged + 1 < self.applied
        ):
            acts.append(Act.READ)
        if averages and self.averaged < self.applied:
            acts.append(Act.AVERAGE)
        return acts

    def do(self, act: Act) -> Event:
        """Note that it is done."""
        peer: int | None = None
        if act is Act.READ:
            step, self.read = self.read, self.read + 1
        elif act is Act.APPLY:
            step, self.applied = self.applied, self.applied + 1
        else:
            step, self.averaged = self.averaged, self.averaged + 1
            peer = passive_peer(self.rank, self.size, step, self.seed)
        return Event(act, self.rank, step, self.rank if peer is None else peer)


def _words(seed: int, first: int) -> Iterator[int]:
    block = 0
    while True:
        yield from keyed.words(_BLOCK, seed=seed, step=block, segment=_ORDER - first)
        block += 1

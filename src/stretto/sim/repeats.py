"""Long runs of alike rounds, made short: a ring of 10,000 ranks is 9,999 times the same round.

After a few of them the ranks keep a constant pace; the rounds left out take that pace each. Whether
it was reached is checked on the rounds that were kept; the law on prices compares with the whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stretto.sim.outline import Messages, Outline, Rounds
from stretto.sim.tasks import Floats, Ints

_PERIODS = (1, 2, 3, 4)
_STRIDE = 12
"""Rounds are left out by multiples of every period that is looked for."""
_WINDOW = 2 * _STRIDE
_EVEN = 1e-9


@dataclass(frozen=True, slots=True)
class Cut:
    """An outline without most of its alike rounds."""

    outline: Outline
    gaps: tuple[tuple[int, int], ...]
    """(round before which some are left out, how many)"""

    def left_out_s(self, done_s: Floats) -> float | None:
        """Return what the rounds left out take, given when each round that was kept is done.

        None where the ranks had not reached a constant pace before the gap.
        """
        done = done_s.reshape(self.outline.alike.num_ranks, -1)
        paces = [_pace(done[:, at - _WINDOW : at]) for at, _ in self.gaps]
        total = 0.0
        for pace, (_, count) in zip(paces, self.gaps, strict=True):
            if pace is None:
                return None
            total += pace * count
        return total


def cuts(outline: Outline) -> Iterator[Cut]:
    """Yield shorter and shorter cuts of ``outline``; none where its rounds are not alike."""
    alike = _alike(outline)
    if alike is None:
        return
    for keep in (
        2 * outline.alike.num_ranks + 3 * _WINDOW,
        8 * outline.alike.num_ranks + 16 * _WINDOW,
    ):
        dropped = _dropped(alike, keep)
        if dropped.any():
            yield _without(outline, dropped)


def _alike(outline: Outline) -> NDArray[np.bool_] | None:
    """Return which rounds, by place in every rank's list, repeat the one before on all ranks.

    None unless all ranks have as many rounds, each starting when the one before it is done.
    """
    rounds, messages = outline.rounds, outline.messages
    count = np.bincount(rounds.rank, minlength=outline.alike.num_ranks)
    num = int(count[0])
    chained = np.unique(rounds.later[rounds.earlier == rounds.later - 1])
    if (count != num).any() or not num or len(chained) != len(rounds) - outline.alike.num_ranks:
        return None
    lane = rounds.lane.reshape(outline.alike.num_ranks, num)
    alike = np.concatenate([[False], (lane[:, 1:] == lane[:, :-1]).all(axis=0)])
    place, other = messages.source % num, messages.target % num
    alike[place[place != other]] = alike[other[place != other]] = False
    order = np.lexsort((messages.source, place))
    rows = np.stack(
        [
            messages.source // num,
            messages.way,
            messages.stop - messages.start,
            messages.added,
        ],
        axis=1,
    )[order]
    return alike & _same_as_before(rows, place[order], num)


def _same_as_before(rows: Ints, place: Ints, num: int) -> NDArray[np.bool_]:
    """Return for each place whether its rows equal those of the place before."""
    count = np.bincount(place, minlength=num)
    before = np.concatenate([[-1], count[:-1]])
    back = np.maximum(np.arange(len(rows)) - count[place], 0)
    differs = (rows != rows[back]).any(axis=1)
    different = np.bincount(place, weights=differs, minlength=num) > 0
    same: NDArray[np.bool_] = (count == before) & ~different
    return same


def _dropped(alike: NDArray[np.bool_], keep: int) -> NDArray[np.bool_]:
    """Return which rounds to leave out, of every run all but about ``keep``."""
    dropped = np.zeros_like(alike)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], alike.astype(np.int8), [0]])))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        spare = (end - first - keep) // _STRIDE * _STRIDE
        if spare > 0:
            dropped[end - spare : end] = True
    return dropped


def _without(outline: Outline, dropped: NDArray[np.bool_]) -> Cut:
    num, ranks = len(dropped), outline.alike.num_ranks
    kept = np.flatnonzero(~dropped)
    new = np.cumsum(~dropped) - 1
    messages = outline.messages
    stay = ~dropped[messages.source % num]
    fewer = Messages(
        _moved(messages.source[stay], num, new, len(kept)),
        _moved(messages.target[stay], num, new, len(kept)),
        messages.start[stay],
        messages.stop[stay],
        messages.added[stay],
        messages.way[stay],
    )
    every = np.arange(ranks * len(kept))
    later = every[every % len(kept) != 0]
    lane = outline.rounds.lane.reshape(ranks, num)[:, kept].ravel()
    rounds = Rounds(every // len(kept), lane, later - 1, later)
    gap = np.concatenate([[kept[0]], np.diff(kept) - 1])
    tail = num - 1 - int(kept[-1])
    places = [(int(at), int(gap[at])) for at in np.flatnonzero(gap)]
    places += [(len(kept), tail)] if tail else []
    return Cut(replace(outline, rounds=rounds, messages=fewer), tuple(places))


def _moved(index: Ints, num: int, new: Ints, kept: int) -> Ints:
    return index // num * kept + new[index % num]


def _pace(done: Floats) -> float | None:
    """Return the time a round takes where all ranks keep one pace, over a few rounds each."""
    for period in _PERIODS:
        taken = done[:, period:] - done[:, :-period]
        mean = float(taken.mean())
        if np.abs(taken - mean).max() <= _EVEN * mean:
            return mean / period
    return None

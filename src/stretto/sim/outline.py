"""A schedule as columns, both ends of every message joined: what is there before it has a size.

Where ranks are alike, only those that stand for all are laid out: a message to another rank is one
to the rank that stands for it, which does the same at the same times.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stretto.comm.schedule import Action, Program, Schedule, rounds
from stretto.errors import ScheduleError, StrettoError
from stretto.sim.alike import Alike, all_different, by_program
from stretto.sim.tasks import Ints

MOST_OPERATIONS = 3_000_000
"""More would take minutes and gigabytes."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of all ranks that are laid out, rank after rank."""

    rank: Ints
    """Its place among those laid out."""
    lane: Ints
    earlier: Ints
    later: Ints
    """Pairs: round ``later[i]`` starts when round ``earlier[i]`` is done, among others."""

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Messages:
    """Every message, by its two rounds; ``start`` and ``stop`` are chunks as the sender says."""

    source: Ints
    """The sender's round."""
    target: Ints
    """The receiver's round."""
    start: Ints
    stop: Ints
    added: Ints
    """1 where the receiver adds, 0 where it copies."""
    way: Ints
    """From the sender to the receiver, as `Alike` counts it."""

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True)
class Outline:
    """A schedule's rounds and messages, of those ranks that stand for all."""

    schedule: Schedule
    alike: Alike
    rounds: Rounds
    messages: Messages


@lru_cache(maxsize=4)
def outline(schedule: Schedule, alike: Alike | None = None) -> Outline:
    """Lay out the ranks that stand for all; every rank where none are said to be alike.

    Raises:
        ScheduleError: An end without its other end.
        StrettoError: Too many operations to follow them all.
    """
    alike = alike or all_different(schedule)
    read = by_program(schedule) if alike.copies > 1 else alike
    _check_size(schedule, alike)
    reader = _Reader(schedule)
    for rank in read.ranks.tolist():
        reader.add(rank, schedule.program(rank))
        if len(reader.peer) > MOST_OPERATIONS:
            raise StrettoError(_too_large(schedule, f"more than {MOST_OPERATIONS:,}"))
    ops, cut = reader.columns()
    if read != alike:
        ops, cut = _spread(ops, cut, read, alike.ranks)
    cut = replace(cut, rank=alike.stand_in(cut.rank))
    return Outline(schedule, alike, cut, _joined(schedule, alike, ops))


@dataclass(frozen=True, slots=True)
class _Cut:
    """How programs of one shape fall into rounds."""

    home: Ints
    """The round of each operation."""
    lanes: list[int]
    pairs: Ints
    """[pair, (earlier, later)]"""


@dataclass(frozen=True, slots=True)
class _Operations:
    """Operations as columns, rank after rank."""

    rank: Ints
    peer: Ints
    start: Ints
    stop: Ints
    lane: Ints
    home: Ints
    """The round of each."""
    sends: NDArray[np.bool_]
    adds: NDArray[np.bool_]


@dataclass(slots=True)
class _Reader:
    """Turns programs into columns."""

    schedule: Schedule
    rank: list[int] = field(default_factory=list)
    peer: list[int] = field(default_factory=list)
    action: list[Action] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    stop: list[int] = field(default_factory=list)
    lane: list[int] = field(default_factory=list)
    home: list[Ints] = field(default_factory=list)
    round_rank: list[int] = field(default_factory=list)
    round_lane: list[int] = field(default_factory=list)
    pairs: list[Ints] = field(default_factory=list)
    known: dict[object, _Cut] = field(default_factory=dict)

    def add(self, rank: int, program: Program) -> None:
        """Read one rank's program; programs of one shape are cut into rounds once."""
        action, peer, start, stop, after, lane = zip(*program, strict=True) if program else [()] * 6
        cut = self.known.get((lane, after))
        if cut is None:
            cut = self.known[lane, after] = _cut(self.schedule, rank, program)
        first = len(self.round_rank)
        self.rank += [rank] * len(program)
        self.peer += peer
        self.action += action
        self.start += start
        self.stop += stop
        self.lane += lane
        self.home.append(cut.home + first)
        self.round_rank += [rank] * len(cut.lanes)
        self.round_lane += cut.lanes
        self.pairs.append(cut.pairs + first)

    def columns(self) -> tuple[_Operations, Rounds]:
        """Return what was read."""
        pairs = np.concatenate(self.pairs)
        send, add = Action.SEND, Action.ADD
        ops = _Operations(
            rank=np.array(self.rank, dtype=np.int64),
            peer=np.array(self.peer, dtype=np.int64),
            start=np.array(self.start, dtype=np.int64),
            stop=np.array(self.stop, dtype=np.int64),
            lane=np.array(self.lane, dtype=np.int64),
            home=np.concatenate(self.home),
            sends=np.array([action is send for action in self.action], dtype=np.bool_),
            adds=np.array([action is add for action in self.action], dtype=np.bool_),
        )
        rank, lane = (np.array(c, dtype=np.int64) for c in (self.round_rank, self.round_lane))
        return ops, Rounds(rank, lane, pairs[:, 0], pairs[:, 1])


def _spread(ops: _Operations, cut: Rounds, read: Alike, ranks: Ints) -> tuple[_Operations, Rounds]:
    """Give each of ``ranks`` what was read of the rank that stands for it.

    Of chunks only the number is right then, not the place.
    """
    source = read.stand_in(ranks)
    its_ops = _Runs.of(read.stand_in(ops.rank), read.num_ranks, source)
    its_rounds = _Runs.of(read.stand_in(cut.rank), read.num_ranks, source)
    its_pairs = _Runs.of(read.stand_in(cut.rank)[cut.later], read.num_ranks, source)
    at, rank = its_ops.index, ranks[its_ops.turn]
    shift = its_rounds.shift
    moved = _Operations(
        rank=rank,
        peer=read.target(rank, read.way(ops.rank, ops.peer)[at]),
        start=ops.start[at],
        stop=ops.stop[at],
        lane=ops.lane[at],
        home=ops.home[at] + shift[its_ops.turn],
        sends=ops.sends[at],
        adds=ops.adds[at],
    )
    lane = cut.lane[its_rounds.index]
    earlier = cut.earlier[its_pairs.index] + shift[its_pairs.turn]
    later = cut.later[its_pairs.index] + shift[its_pairs.turn]
    return moved, Rounds(ranks[its_rounds.turn], lane, earlier, later)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of rows taken again, one for each turn."""

    index: Ints
    """The rows to take."""
    turn: Ints
    """Which turn each of them is taken in."""
    shift: Ints
    """By how much each turn's first row has moved."""

    @classmethod
    def of(cls, owner: Ints, num_owners: int, wanted: Ints) -> "_Runs":
        """Return the rows of each of ``wanted``, where rows are sorted by their owner."""
        count = np.bincount(owner, minlength=num_owners)
        first, each = (np.cumsum(count) - count)[wanted], count[wanted]
        begins = np.cumsum(each) - each
        turn = np.repeat(np.arange(len(wanted)), each)
        index = np.arange(int(each.sum())) - begins[turn] + first[turn]
        return cls(index, turn, begins - first)


def _cut(schedule: Schedule, rank: int, program: Program) -> _Cut:
    """Find each operation's round: a lane's operations fill its rounds in program order."""
    cut = rounds(schedule, rank)
    places: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for index, batch in enumerate(cut):
        places.setdefault(batch.lane, []).extend([index] * len(batch.ops))
        before = {*batch.waits, *([last[batch.lane]] if batch.lane in last else [])}
        pairs += [(earlier, index) for earlier in sorted(before)]
        last[batch.lane] = index
    turns = {lane: iter(indices) for lane, indices in places.items()}
    home = np.array([next(turns[op.lane]) for op in program], dtype=np.int64)
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return _Cut(home, [batch.lane for batch in cut], edges)


def _joined(schedule: Schedule, alike: Alike, ops: _Operations) -> Messages:
    """Match the k-th send of every route with its k-th receive."""
    n = schedule.size
    sender = np.where(ops.sends, ops.rank, ops.peer)
    receiver = np.where(ops.sends, ops.peer, ops.rank)
    way = alike.way(sender, receiver)
    route = alike.stand_in(sender) * n + way
    route = route * (int(ops.lane.max(initial=0)) + 1) + ops.lane
    length = ops.stop - ops.start
    out, into = np.flatnonzero(ops.sends), np.flatnonzero(~ops.sends)
    out = out[np.argsort(route[out], kind="stable")]
    into = into[np.argsort(route[into], kind="stable")]
    if (
        len(out) != len(into)
        or (route[out] != route[into]).any()
        or (length[out] != length[into]).any()
    ):
        raise ScheduleError(
            f"{schedule.name} for {n} ranks: sends and receives do not match, so it cannot be "
            "priced; stretto.comm.verify says where"
        )
    order = np.argsort(out)  # as the senders have them
    out, into = out[order], into[order]
    return Messages(
        ops.home[out],
        ops.home[into],
        ops.start[out],
        ops.stop[out],
        ops.adds[into].astype(np.int64),
        way[out],
    )


def _check_size(schedule: Schedule, alike: Alike) -> None:
    """Refuse what is hopeless before the work begins; a root alone may have many operations."""
    if alike.num_ranks > 64:
        about = len(schedule.program(int(alike.ranks[-1]))) * alike.num_ranks
        if about > MOST_OPERATIONS:
            raise StrettoError(_too_large(schedule, f"about {about:,}"))


def _too_large(schedule: Schedule, how_many: str) -> str:
    return (
        f"{schedule.name} for {schedule.size:,} ranks has {how_many} operations and no shift of "
        f"the ranks maps it onto itself on these hosts, so all would have to be followed; at most "
        f"{MOST_OPERATIONS:,} are: give all hosts equally many ranks, or take fewer ranks or parts"
    )

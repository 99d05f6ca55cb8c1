"""A schedule as columns, both ends of every message joined: what is there before it has a size.

Where a shift of the ranks maps a schedule onto itself, only the ranks of one period are laid out:
a message to a rank outside is one to the rank inside that does the same, at the same times.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stretto.cluster.world import Mesh
from stretto.comm.schedule import Action, Program, Schedule, rounds
from stretto.errors import ScheduleError, StrettoError
from stretto.sim.tasks import Ints

MOST_OPERATIONS = 3_000_000
"""More would take minutes and gigabytes."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of all ranks that are laid out, rank after rank."""

    rank: Ints
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
    distance: Ints
    """From the sender up to the receiver, modulo the number of ranks."""

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True)
class Outline:
    """A schedule's rounds and messages; ``copies`` as many others do the same elsewhere."""

    schedule: Schedule
    num_ranks: int
    """Ranks that are laid out, from 0 on."""
    rounds: Rounds
    messages: Messages

    @property
    def copies(self) -> int:
        """Return how many ranks each rank stands for."""
        return self.schedule.size // self.num_ranks


def representatives(schedule: Schedule, mesh: Mesh | None) -> int:
    """Return how many ranks stand for all: whole hosts of ``mesh``, where one is given."""
    n = schedule.size
    if schedule.period is None or n == 1:
        return n
    period = math.gcd(schedule.period, n)
    if mesh is None:
        return period
    each = set(mesh.ranks_per_host)
    return math.lcm(period, each.pop()) if len(each) == 1 else n


@lru_cache(maxsize=4)
def outline(schedule: Schedule, num_ranks: int) -> Outline:
    """Lay out the first ``num_ranks`` ranks, which stand for all.

    Raises:
        ScheduleError: An end without its other end.
        StrettoError: Too many operations to follow them all.
    """
    _check_size(schedule, num_ranks)
    symmetric = num_ranks < schedule.size and schedule.period is not None
    read = math.gcd(schedule.period or 0, num_ranks) if symmetric else num_ranks
    reader = _Reader(schedule)
    for rank in range(read):
        reader.add(rank, schedule.program(rank))
        if len(reader.peer) > MOST_OPERATIONS:
            raise StrettoError(_too_large(schedule, f"more than {MOST_OPERATIONS:,}"))
    ops, cut = reader.columns()
    if read < num_ranks:
        again = _Again(read, num_ranks // read)
        ops = again.operations(ops, len(cut), schedule.size)
        cut = again.rounds(cut)
    return Outline(schedule, num_ranks, cut, _joined(schedule, num_ranks, ops))


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
        shape = tuple([(op.lane, op.after) for op in program])
        cut = self.known.get(shape)
        if cut is None:
            cut = self.known[shape] = _cut(self.schedule, rank, program)
        first = len(self.round_rank)
        self.rank += [rank] * len(program)
        self.peer += [op.peer for op in program]
        self.action += [op.action for op in program]
        self.start += [op.start for op in program]
        self.stop += [op.stop for op in program]
        self.lane += [op.lane for op in program]
        self.home.append(cut.home + first)
        self.round_rank += [rank] * len(cut.lanes)
        self.round_lane += cut.lanes
        self.pairs.append(cut.pairs + first)

    def columns(self) -> tuple[_Operations, Rounds]:
        """Return what was read."""
        pairs = np.concatenate(self.pairs)
        ops = _Operations(
            rank=np.array(self.rank, dtype=np.int64),
            peer=np.array(self.peer, dtype=np.int64),
            start=np.array(self.start, dtype=np.int64),
            stop=np.array(self.stop, dtype=np.int64),
            lane=np.array(self.lane, dtype=np.int64),
            home=np.concatenate(self.home),
            sends=np.array([action is Action.SEND for action in self.action], dtype=np.bool_),
            adds=np.array([action is Action.ADD for action in self.action], dtype=np.bool_),
        )
        rank, lane = (np.array(c, dtype=np.int64) for c in (self.round_rank, self.round_lane))
        return ops, Rounds(rank, lane, pairs[:, 0], pairs[:, 1])


@dataclass(frozen=True, slots=True)
class _Again:
    """What was read of ``read`` ranks, repeated for those that do the same, moved on."""

    read: int
    times: int

    def moved(self, column: Ints, by: int) -> Ints:
        """Return ``column`` again and again, moved on by ``by`` each time."""
        return (column + by * np.arange(self.times)[:, None]).ravel()

    def operations(self, ops: _Operations, num_rounds: int, size: int) -> _Operations:
        """Return the operations of all; of chunks only the number counts here, not the place."""
        return _Operations(
            rank=self.moved(ops.rank, self.read),
            peer=self.moved(ops.peer, self.read) % size,
            start=self.moved(ops.start, 0),
            stop=self.moved(ops.stop, 0),
            lane=self.moved(ops.lane, 0),
            home=self.moved(ops.home, num_rounds),
            sends=np.tile(ops.sends, self.times),
            adds=np.tile(ops.adds, self.times),
        )

    def rounds(self, cut: Rounds) -> Rounds:
        """Return the rounds of all."""
        return Rounds(
            self.moved(cut.rank, self.read),
            self.moved(cut.lane, 0),
            self.moved(cut.earlier, len(cut)),
            self.moved(cut.later, len(cut)),
        )


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


def _joined(schedule: Schedule, num_ranks: int, ops: _Operations) -> Messages:
    """Match the k-th send of every route with its k-th receive."""
    n = schedule.size
    sender = np.where(ops.sends, ops.rank, ops.peer) % num_ranks
    distance = np.where(ops.sends, ops.peer - ops.rank, ops.rank - ops.peer) % n
    route = (sender * n + distance) * (int(ops.lane.max(initial=0)) + 1) + ops.lane
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
        distance[out],
    )


def _check_size(schedule: Schedule, num_ranks: int) -> None:
    """Refuse what is hopeless before the work begins; a root alone may have many operations."""
    if num_ranks > 64:
        about = len(schedule.program(num_ranks - 1)) * num_ranks
        if about > MOST_OPERATIONS:
            raise StrettoError(_too_large(schedule, f"about {about:,}"))


def _too_large(schedule: Schedule, how_many: str) -> str:
    return (
        f"{schedule.name} for {schedule.size:,} ranks has {how_many} operations and no shift of "
        f"the ranks maps it onto itself on these hosts, so all would have to be followed; at most "
        f"{MOST_OPERATIONS:,} are: give all hosts equally many ranks, or take fewer ranks or parts"
    )

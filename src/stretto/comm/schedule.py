"""A collective as a value: per rank, an ordered program of sends and receives nobody has run yet.

One `Schedule` is proved by `stretto.comm.verify`, run by `stretto.comm.execute`, priced by
`stretto.sim` and drawn by `stretto show`: each algorithm is written once, as data.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from stretto.errors import ScheduleError


class Action(Enum):
    """What a rank does with a range of chunks."""

    SEND = "send"
    ADD = "add"
    """Receive, and add to what is held."""
    COPY = "copy"
    """Receive, and replace what is held."""


class Op(NamedTuple):
    """One message seen from one of its ends: the chunks ``start`` to ``stop``, to or from ``peer``.

    Messages between two ranks on one lane are matched in program order. A tuple, since a price at
    ten thousand ranks makes hundreds of thousands of these.
    """

    action: Action
    peer: int
    start: int
    stop: int
    after: tuple[int, ...] = ()
    """Earlier operations of this program, by index, that must be done before it starts."""
    lane: int = 0
    """Operations of one lane start in program order; lanes run beside each other."""


Program = tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank sends and receives; a rank's program is made only when it is asked for."""

    name: str
    size: int
    num_chunks: int
    program: Callable[[int], Program]
    native: bool = False
    """Carried out by the back end's own call; the program says what that call is taken to do."""
    period: int | None = None
    """Rank r + period does what rank r does, all peers moved on by as much (modulo ``size``): a
    price then needs ``period`` representatives, however many ranks there are."""
    turn: int | None = None
    """Ranks stand in blocks of so many, and turning all blocks by one place maps the schedule onto
    itself: the first rank of a block does what the others do. A multiple of it is the period."""


@dataclass(frozen=True, slots=True)
class Round:
    """Operations of one lane that are in flight together; additions are applied at its end."""

    lane: int
    ops: Program
    waits: tuple[int, ...] = ()
    """Rounds of other lanes, by index in the rank's list, that must be done before it starts."""


def in_steps(steps: Iterable[Sequence[Op]]) -> Program:
    """Return the program that takes one step after another, whatever lanes they are on."""
    ops: list[Op] = []
    before: tuple[int, ...] = ()
    for step in steps:
        first = len(ops)
        ops += [Op(op.action, op.peer, op.start, op.stop, before, op.lane) for op in step]
        before = tuple(range(first, len(ops))) or before
    return tuple(ops)


def one_after_another(*programs: Program) -> Program:
    """Return the program in which each of ``programs`` begins when the one before it has ended."""
    ops: list[Op] = []
    ends: tuple[int, ...] = ()
    for program in filter(None, programs):
        first = len(ops)
        ops += [
            Op(op.action, op.peer, op.start, op.stop, after or ends, op.lane)
            for op, after in zip(program, _waits(program, first), strict=True)
        ]
        needed = set[int]().union(*[op.after for op in ops[first:]])
        ends = tuple([index for index in range(first, len(ops)) if index not in needed])
    return tuple(ops)


def _waits(program: Program, by: int) -> Iterator[tuple[int, ...]]:
    """Yield what each operation waits for, were there ``by`` others before the first."""
    before: tuple[int, ...] = ()
    moved = before
    for op in program:
        if op.after != before:  # most wait for what the one before them waits for
            before = op.after
            moved = tuple([by + index for index in before])
        yield moved


@dataclass(frozen=True, slots=True)
class Placing:
    """Where a smaller schedule stands inside a larger one."""

    members: Sequence[int]
    """The ranks that take part, in the order of the smaller schedule's own."""
    offset: int = 0
    """The larger schedule's chunk at which the smaller one's begin."""
    scale: int = 1
    """How many of the larger one's chunks make one of the smaller one's."""
    lane: int = 0
    """Added to its lanes."""

    def program(self, schedule: Schedule, rank: int) -> Program:
        """Return what ``rank`` does in it, in the larger schedule's terms; nothing if not in it."""
        members, offset, scale = self.members, self.offset, self.scale
        if rank not in members:
            return ()
        return tuple(
            [
                Op(
                    action,
                    members[peer],
                    offset + start * scale,
                    offset + stop * scale,
                    after,
                    self.lane + lane,
                )
                for action, peer, start, stop, after, lane in schedule.program(members.index(rank))
            ]
        )


@lru_cache(maxsize=256)
def rounds(schedule: Schedule, rank: int) -> tuple[Round, ...]:
    """Cut a rank's program into rounds, ordered by their first operation.

    A lane takes its rounds one after another. An operation joins its lane's latest round unless
    it depends on that round, or on a round of another lane that the lane has not waited for yet.
    """
    cut = _Cut()
    for index, op in enumerate(schedule.program(rank)):
        _check(schedule, rank, index, op)
        cut.add(op)
    return tuple(
        Round(lane, tuple(ops), tuple(waits))
        for lane, ops, waits in zip(cut.lanes, cut.ops, cut.waits, strict=True)
    )


class _Cut:
    """Rounds as far as they are known; ``home`` is the round of each operation so far."""

    def __init__(self) -> None:
        self.home: list[int] = []
        self.lanes: list[int] = []
        self.ops: list[list[Op]] = []
        self.waits: list[list[int]] = []
        self._latest: dict[int, int] = {}
        self._known: dict[tuple[int, int], int] = {}

    def add(self, op: Op) -> None:
        latest = self._latest.get(op.lane)
        needed = {self.home[index] for index in op.after}
        new = sorted(n for n in needed if self.lanes[n] != op.lane and not self._waited(op.lane, n))
        if latest is None or latest in needed or new:
            latest = self._latest[op.lane] = len(self.ops)
            self.lanes.append(op.lane)
            self.ops.append([])
            self.waits.append(new)
            for n in new:
                self._known[op.lane, self.lanes[n]] = n
        self.ops[latest].append(op)
        self.home.append(latest)

    def _waited(self, lane: int, needed: int) -> bool:
        return self._known.get((lane, self.lanes[needed]), -1) >= needed


def pipelined(schedule: Schedule, parts: int, width: int = 1) -> Schedule:
    """Cut the tensor into ``parts`` that go through ``schedule`` one behind the other.

    A part's operations keep their lanes, so that a later part is in one phase while an earlier
    one is in the next; where a schedule has a single phase, ``width`` copies of each lane let
    that many parts travel beside each other.
    """
    return _repeated(schedule, parts, width, schedule.num_chunks)


def sliced(schedule: Schedule, parts: int, width: int = 1) -> Schedule:
    """Cut every chunk into ``parts`` slices that go through ``schedule`` one behind the other.

    As `pipelined`, but a chunk stays in one piece, so whoever owned it still owns one range. For
    schedules whose messages are single chunks.
    """
    return _repeated(schedule, parts, width, step=1, scale=parts)


def _repeated(schedule: Schedule, parts: int, width: int, step: int, scale: int = 1) -> Schedule:
    """Run ``schedule`` once for each part, its chunk c being the chunk c * scale + part * step."""
    if parts == 1:
        return schedule

    def program(rank: int) -> Program:
        base = schedule.program(rank)
        ops: list[Op] = []
        last_on: dict[int, int] = {}
        for part in range(parts):
            shift, entered = part * step, set[int]()
            for op, after in zip(base, _waits(base, len(ops)), strict=True):
                action, peer, start, stop, _, lane = op
                lane = lane * width + part % width
                if lane not in entered:
                    entered.add(lane)
                    if part >= width:  # a part never joins another's round
                        after += (last_on[lane],)
                last_on[lane] = len(ops)
                last = (stop - 1) * scale + shift
                ops.append(Op(action, peer, start * scale + shift, last + 1, after, lane))
        return tuple(ops)

    return replace(
        schedule,
        name=f"{schedule.name}/{parts}",
        num_chunks=schedule.num_chunks * parts,
        program=program,
    )


def on_lane(schedule: Schedule, lane: int) -> Schedule:
    """Return ``schedule`` on one lane: beside other messages, not among them."""

    def program(rank: int) -> Program:
        return tuple(op._replace(lane=lane) for op in schedule.program(rank))

    return replace(schedule, name=f"{schedule.name} on lane {lane}", program=program)


def chunk_bounds(numel: int, num_chunks: int) -> tuple[int, ...]:
    """Return where each chunk begins, and the end: sizes differ by one element at most."""
    quotient, larger = divmod(numel, num_chunks)
    sizes = [quotient + (chunk < larger) for chunk in range(num_chunks)]
    return tuple(accumulate(sizes, initial=0))


def _check(schedule: Schedule, rank: int, index: int, op: Op) -> None:
    wrong = None
    if op.peer == rank or not 0 <= op.peer < schedule.size:
        wrong = f"there is no peer {op.peer}"
    elif not 0 <= op.start < op.stop <= schedule.num_chunks:
        wrong = f"no chunks {op.start}..{op.stop} of {schedule.num_chunks}"
    elif op.after and not 0 <= min(op.after) <= max(op.after) < index:
        wrong = f"waits for {op.after}, which are not earlier operations"
    if wrong:
        where = f"{schedule.name} for {schedule.size} ranks: operation {index} of rank {rank}"
        raise ScheduleError(f"{where}: {wrong}")

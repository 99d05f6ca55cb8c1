"""Collectives as data: for each rank an ordered program of sends and receives.

Each algorithm is written once, as a `Schedule`. `stretto.collectives.verify` verifies it,
`stretto.comm.collective_executor` runs it, `stretto.simulator` prices it, `stretto show` draws it.
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
    """Receive, and add to the own values."""
    COPY = "copy"
    """Receive, and overwrite the own values."""


class Op(NamedTuple):
    """One end of a message: the chunks from ``start`` to before ``stop``, to or from ``peer``.

    Messages between two ranks on one lane are matched in program order. This is a named tuple for
    speed: a simulation of ten thousand ranks creates hundreds of thousands.
    """

    action: Action
    peer: int
    start: int
    stop: int
    after: tuple[int, ...] = ()
    """Indices of earlier operations of the program that must be done before this one starts."""
    lane: int = 0
    """Operations of one lane start in program order; different lanes run concurrently."""


Program = tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A collective: the program of every rank, computed only when it is asked for."""

    name: str
    size: int
    """Number of ranks."""
    num_chunks: int
    """Number of equal chunks into which the tensor is cut."""
    program: Callable[[int], Program]
    """Returns the program of a rank."""
    native: bool = False
    """Whether the back end's own call runs it. The program is then a model of that call."""
    period: int | None = None
    """A symmetry: rank r + period has the program of rank r with all peers shifted by ``period``
    (modulo ``size``). A simulation then needs only ``period`` representative ranks."""
    rotation_block: int | None = None
    """Another symmetry: ranks form blocks of this size, and rotating every block by one place maps
    the schedule onto itself. So all ranks of a block act alike. The period is a multiple of it."""


@dataclass(frozen=True, slots=True)
class Round:
    """Operations of one lane that are in flight together; additions are applied at its end."""

    lane: int
    ops: Program
    waits_for: tuple[int, ...] = ()
    """Indices, in the rank's list, of rounds of other lanes that must be done before this one."""


def chain_steps(steps: Iterable[Sequence[Op]]) -> Program:
    """Return the program in which each step starts when the one before is done, on any lanes."""
    ops: list[Op] = []
    before: tuple[int, ...] = ()
    for step in steps:
        first = len(ops)
        ops += [Op(op.action, op.peer, op.start, op.stop, before, op.lane) for op in step]
        before = tuple(range(first, len(ops))) or before
    return tuple(ops)


def chain_programs(*programs: Program) -> Program:
    """Return the program in which each of ``programs`` starts when the one before it is done."""
    ops: list[Op] = []
    ends: tuple[int, ...] = ()
    for program in filter(None, programs):
        first = len(ops)
        ops += [
            Op(op.action, op.peer, op.start, op.stop, after or ends, op.lane)
            for op, after in zip(program, _shifted_dependencies(program, first), strict=True)
        ]
        needed = set[int]().union(*[op.after for op in ops[first:]])
        ends = tuple([index for index in range(first, len(ops)) if index not in needed])
    return tuple(ops)


def _shifted_dependencies(program: Program, shift_by: int) -> Iterator[tuple[int, ...]]:
    """Yield the ``after`` of each operation as if ``shift_by`` others stood before the first."""
    before: tuple[int, ...] = ()
    shifted = before
    for op in program:
        if op.after != before:  # most operations have the same ``after`` as the one before
            before = op.after
            shifted = tuple([shift_by + index for index in before])
        yield shifted


@dataclass(frozen=True, slots=True)
class SubgroupMapping:
    """Maps ranks, chunks and lanes of a smaller schedule to those of a larger one."""

    members: Sequence[int]
    """The rank of the larger schedule for each rank of the smaller one."""
    offset: int = 0
    """The chunk of the larger schedule at which the smaller one's chunk 0 begins."""
    scale: int = 1
    """Chunks of the larger schedule for each chunk of the smaller one."""
    lane: int = 0
    """Added to the lanes of the smaller schedule."""

    def program(self, schedule: Schedule, rank: int) -> Program:
        """Return the program of ``rank``, mapped to the larger schedule; empty for non-members."""
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
    builder = _RoundBuilder()
    for index, op in enumerate(schedule.program(rank)):
        _check_op(schedule, rank, index, op)
        builder.add(op)
    return tuple(
        Round(lane, tuple(ops), tuple(waits_for))
        for lane, ops, waits_for in zip(builder.lanes, builder.ops, builder.waits_for, strict=True)
    )


class _RoundBuilder:
    """Collects operations into rounds; ``round_of_op`` is the round of each operation so far."""

    def __init__(self) -> None:
        self.round_of_op: list[int] = []
        self.lanes: list[int] = []
        self.ops: list[list[Op]] = []
        self.waits_for: list[list[int]] = []
        self._latest_round: dict[int, int] = {}
        self._waited_rounds: dict[tuple[int, int], int] = {}

    def add(self, op: Op) -> None:
        latest = self._latest_round.get(op.lane)
        needed = {self.round_of_op[index] for index in op.after}
        new = sorted(
            n for n in needed if self.lanes[n] != op.lane and not self._has_waited_for(op.lane, n)
        )
        if latest is None or latest in needed or new:
            latest = self._latest_round[op.lane] = len(self.ops)
            self.lanes.append(op.lane)
            self.ops.append([])
            self.waits_for.append(new)
            for n in new:
                self._waited_rounds[op.lane, self.lanes[n]] = n
        self.ops[latest].append(op)
        self.round_of_op.append(latest)

    def _has_waited_for(self, lane: int, needed: int) -> bool:
        return self._waited_rounds.get((lane, self.lanes[needed]), -1) >= needed


def pipeline_tensor(schedule: Schedule, parts: int, width: int = 1) -> Schedule:
    """Cut the tensor into ``parts`` that go through ``schedule`` as a pipeline.

    All parts use the same lanes: while a part is in one phase, the next part is in the phase
    before. For a schedule of a single phase, ``width`` copies of each lane let that many parts run
    concurrently.
    """
    return _repeat_for_parts(schedule, parts, width, schedule.num_chunks)


def pipeline_chunks(schedule: Schedule, parts: int, width: int = 1) -> Schedule:
    """Cut every chunk into ``parts`` slices that go through ``schedule`` as a pipeline.

    As `pipeline_tensor`, but the slices of a chunk stay together, so its owner still owns one
    range. For schedules whose messages are single chunks.
    """
    return _repeat_for_parts(schedule, parts, width, step=1, scale=parts)


def _repeat_for_parts(
    schedule: Schedule, parts: int, width: int, step: int, scale: int = 1
) -> Schedule:
    """Repeat ``schedule`` for each part; its chunk c is the chunk c * scale + part * step."""
    if parts == 1:
        return schedule

    def program(rank: int) -> Program:
        base = schedule.program(rank)
        ops: list[Op] = []
        last_on: dict[int, int] = {}
        for part in range(parts):
            shift, entered = part * step, set[int]()
            for op, after in zip(base, _shifted_dependencies(base, len(ops)), strict=True):
                action, peer, start, stop, _, lane = op
                lane = lane * width + part % width
                if lane not in entered:
                    entered.add(lane)
                    if part >= width:  # two parts never share a round
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


def move_to_lane(schedule: Schedule, lane: int) -> Schedule:
    """Return ``schedule`` on one lane, so that it runs concurrently with other lanes."""

    def program(rank: int) -> Program:
        return tuple(op._replace(lane=lane) for op in schedule.program(rank))

    return replace(schedule, name=f"{schedule.name} on lane {lane}", program=program)


def chunk_bounds(numel: int, num_chunks: int) -> tuple[int, ...]:
    """Return the first element of each chunk, and the end; sizes differ by one element at most."""
    quotient, larger = divmod(numel, num_chunks)
    sizes = [quotient + (chunk < larger) for chunk in range(num_chunks)]
    return tuple(accumulate(sizes, initial=0))


def _check_op(schedule: Schedule, rank: int, index: int, op: Op) -> None:
    problem = None
    if op.peer == rank or not 0 <= op.peer < schedule.size:
        problem = f"there is no peer {op.peer}"
    elif not 0 <= op.start < op.stop <= schedule.num_chunks:
        problem = f"no chunks {op.start}..{op.stop} of {schedule.num_chunks}"
    elif op.after and not 0 <= min(op.after) <= max(op.after) < index:
        problem = f"waits for {op.after}, which are not earlier operations"
    if problem:
        where = f"{schedule.name} for {schedule.size} ranks: operation {index} of rank {rank}"
        raise ScheduleError(f"{where}: {problem}")

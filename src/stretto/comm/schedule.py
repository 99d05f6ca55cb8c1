"""A collective as a value: per rank, an ordered program of sends and receives nobody has run yet.

One `Schedule` is proved by `stretto.comm.verify`, run by `stretto.comm.execute`, and is what
prices and drawings are made from: each algorithm is written once, as data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate

from stretto.errors import ScheduleError


class Action(Enum):
    """What a rank does with a range of chunks."""

    SEND = "send"
    ADD = "add"
    """Receive, and add to what is held."""
    COPY = "copy"
    """Receive, and replace what is held."""


@dataclass(frozen=True, slots=True)
class Op:
    """One message seen from one of its ends: the chunks ``start`` to ``stop``, to or from ``peer``.

    Messages between two ranks on one lane are matched in program order.
    """

    action: Action
    peer: int
    start: int
    stop: int
    after: tuple[int, ...] = ()
    """Earlier operations of this program, by index, that must be done before it starts."""
    lane: int = 0


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


@lru_cache(maxsize=256)
def rounds(schedule: Schedule, rank: int) -> tuple[Program, ...]:
    """Cut a rank's program into rounds: runs of operations that need not wait for one another.

    Within a round everything is in flight together, and additions are applied at its end.
    """
    result: list[list[Op]] = [[]]
    first = 0
    for index, op in enumerate(schedule.program(rank)):
        _check(schedule, rank, index, op)
        if any(needed >= first for needed in op.after):
            result.append([])
            first = index
        result[-1].append(op)
    return tuple(tuple(batch) for batch in result if batch)


def chunk_bounds(numel: int, num_chunks: int) -> tuple[int, ...]:
    """Return where each chunk begins, and the end: sizes differ by one element at most."""
    quotient, larger = divmod(numel, num_chunks)
    sizes = [quotient + (chunk < larger) for chunk in range(num_chunks)]
    return tuple(accumulate(sizes, initial=0))


def _check(schedule: Schedule, rank: int, index: int, op: Op) -> None:
    where = f"{schedule.name} for {schedule.size} ranks: operation {index} of rank {rank}"
    if op.peer == rank or not 0 <= op.peer < schedule.size:
        raise ScheduleError(f"{where}: there is no peer {op.peer}")
    if not 0 <= op.start < op.stop <= schedule.num_chunks:
        raise ScheduleError(f"{where}: no chunks {op.start}..{op.stop} of {schedule.num_chunks}")
    if any(not 0 <= needed < index for needed in op.after):
        raise ScheduleError(f"{where}: waits for {op.after}, which are not earlier operations")

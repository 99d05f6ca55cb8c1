"""Proof, before anything is sent: every input arrives exactly once, nobody waits in a circle."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.comm.schedule import Action, Op, Program, Schedule, rounds
from stretto.errors import ScheduleError


class _Posted(NamedTuple):
    """One end of a message that its rank has reached; ``payload`` only on the sending end."""

    start: int
    stop: int
    payload: NDArray[np.int64] | None


Route = tuple[int, int, int]
"""(source, destination, lane)"""


def contributions(schedule: Schedule) -> NDArray[np.int64]:
    """Return how often each rank's input is in what each rank ends with: [rank, chunk, input].

    The programs are followed with messages that block until both ends are there, the strictest
    back end one could meet, so a schedule that passes cannot lock up on any.

    Raises:
        ScheduleError: An end without its other end, a circular wait, or a receive that would
            overwrite what is still being sent.
    """
    n = schedule.size
    held = np.zeros((n, schedule.num_chunks, n), dtype=np.int64)
    held[np.arange(n), :, np.arange(n)] = 1
    ends: dict[tuple[str, Route], list[_Posted]] = defaultdict(list)
    work = [iter(rounds(schedule, rank)) for rank in range(n)]
    waiting: dict[int, list[tuple[Op, Route, int]]] = {}
    for rank in range(n):
        _post_next(schedule, rank, work[rank], held, ends, waiting)
    while waiting:
        ready = [rank for rank, ops in waiting.items() if all(_matched(ends, *op) for op in ops)]
        if not ready:
            raise ScheduleError(_circle(schedule, ends, waiting))
        for rank in ready:
            for op, route, index in waiting.pop(rank):
                _apply(schedule, held[rank], op, ends[("to", route)], ends[("from", route)], index)
            _post_next(schedule, rank, work[rank], held, ends, waiting)
    _check_nothing_left_over(schedule, ends)
    return held


def verify_allreduce(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every rank ends with every input exactly once."""
    _compare(schedule, contributions(schedule), np.ones(1, dtype=np.int64))


def verify_broadcast(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every rank ends with the input of rank 0 and nothing else."""
    _compare(schedule, contributions(schedule), np.eye(1, schedule.size, dtype=np.int64)[0])


def _compare(schedule: Schedule, held: NDArray[np.int64], wanted: NDArray[np.int64]) -> None:
    wrong = np.argwhere(held != wanted)
    if wrong.size:
        rank, chunk, source = wrong[0]
        raise ScheduleError(
            f"{schedule.name} for {schedule.size} ranks: chunk {chunk} of rank {rank} holds the "
            f"input of rank {source} {held[rank, chunk, source]} times"
        )


def _post_next(
    schedule: Schedule,
    rank: int,
    work: Iterator[Program],
    held: NDArray[np.int64],
    ends: dict[tuple[str, Route], list[_Posted]],
    waiting: dict[int, list[tuple[Op, Route, int]]],
) -> None:
    """Let ``rank`` enter its next round: both its sends and its receives are now visible."""
    batch = next(work, None)
    if batch is None:
        return
    _check_overlap(schedule, rank, batch)
    waiting[rank] = []
    for op in batch:
        sending = op.action is Action.SEND
        route = (rank, op.peer, op.lane) if sending else (op.peer, rank, op.lane)
        side = ends[("to" if sending else "from", route)]
        payload = held[rank, op.start : op.stop].copy() if sending else None
        side.append(_Posted(op.start, op.stop, payload))
        waiting[rank].append((op, route, len(side) - 1))


def _matched(ends: dict[tuple[str, Route], list[_Posted]], op: Op, route: Route, i: int) -> bool:
    other = "from" if op.action is Action.SEND else "to"
    return len(ends[(other, route)]) > i


def _apply(
    schedule: Schedule,
    mine: NDArray[np.int64],
    op: Op,
    sent: list[_Posted],
    received: list[_Posted],
    index: int,
) -> None:
    source, target = sent[index], received[index]
    if (source.start, source.stop) != (target.start, target.stop):
        raise ScheduleError(
            f"{schedule.name} for {schedule.size} ranks: chunks {source.start}..{source.stop} are "
            f"sent where {target.start}..{target.stop} are expected (message {index} with {op})"
        )
    assert source.payload is not None
    if op.action is Action.ADD:
        mine[op.start : op.stop] += source.payload
    elif op.action is Action.COPY:
        mine[op.start : op.stop] = source.payload


def _check_overlap(schedule: Schedule, rank: int, batch: Program) -> None:
    """A copy lands in place, so nothing else of its round may touch the same chunks."""
    for op in batch:
        if op.action is not Action.COPY:
            continue
        for other in batch:
            if other is not op and op.start < other.stop and other.start < op.stop:
                raise ScheduleError(
                    f"{schedule.name} for {schedule.size} ranks: rank {rank} copies into chunks "
                    f"{op.start}..{op.stop} in the round in which it also does {other}"
                )


def _circle(
    schedule: Schedule,
    ends: dict[tuple[str, Route], list[_Posted]],
    waiting: dict[int, list[tuple[Op, Route, int]]],
) -> str:
    stuck = {
        rank: sorted({op.peer for op, route, i in ops if not _matched(ends, op, route, i)})
        for rank, ops in sorted(waiting.items())
    }
    waits = ", ".join(f"rank {rank} for {peers}" for rank, peers in stuck.items())
    return f"{schedule.name} for {schedule.size} ranks: nobody can go on: {waits}"


def _check_nothing_left_over(
    schedule: Schedule, ends: dict[tuple[str, Route], list[_Posted]]
) -> None:
    for source, target, lane in {route for _, route in ends}:
        sent = len(ends.get(("to", (source, target, lane)), ()))
        received = len(ends.get(("from", (source, target, lane)), ()))
        if sent != received:
            raise ScheduleError(
                f"{schedule.name} for {schedule.size} ranks: rank {source} sends {sent} messages "
                f"to rank {target} on lane {lane}, which receives {received}"
            )

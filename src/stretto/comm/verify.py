"""Proof, before anything is sent: every input arrives exactly once, nobody waits in a circle.

The programs are followed symbolically, with messages that block until both ends are there, the
strictest back end one could meet, so a schedule that passes cannot lock up on any. What lanes do
beside each other must not touch the same chunks unless one is known to be done before the other.
"""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from stretto.comm.schedule import Action, Op, Round, Schedule, rounds
from stretto.errors import ScheduleError

Counts = NDArray[np.int64]
Route = tuple[int, int, int]
"""(source, destination, lane)"""


def verify_allreduce(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every rank ends with every input exactly once."""
    _compare(schedule, contributions(schedule), np.ones((1, 1, 1), dtype=np.int64))


def verify_broadcast(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every rank ends with the input of rank 0 and nothing else."""
    _compare(schedule, contributions(schedule), np.eye(1, schedule.size, dtype=np.int64)[None])


def verify_reduce_scatter(schedule: Schedule, shards: int | None = None) -> None:
    """Raise `ScheduleError` unless each rank's own chunks hold every input exactly once.

    ``shards`` as in `owned`; the input of every rank counts all the same.
    """
    held = contributions(schedule)
    wanted = np.where(_own(schedule, shards)[:, :, None], 1, held)
    _compare(schedule, held, wanted)


def verify_all_gather(schedule: Schedule, shards: int | None = None) -> None:
    """Raise `ScheduleError` unless every rank ends with each chunk as its owner had it.

    ``shards`` as in `owned`; of the owners of a chunk it is the one among the rank's own sharers.
    """
    sharers = np.arange(schedule.size) // (shards or schedule.size)
    together = sharers[:, None] == sharers
    wanted = together[:, None, :] & _own(schedule, shards).T
    _compare(schedule, contributions(schedule), wanted.astype(np.int64))


def owned(schedule: Schedule, rank: int, shards: int | None = None) -> range:
    """Return the chunks that are a rank's own, after a reduce-scatter or before an all-gather.

    The tensor is shared out among ``shards`` ranks, and once more among the next ``shards``, as
    hosts do that each have all of it; among all ranks when None.
    """
    shards = shards or schedule.size
    each = schedule.num_chunks // shards
    place = rank % shards
    return range(place * each, (place + 1) * each)


def contributions(schedule: Schedule) -> Counts:
    """Return how often each rank's input is in what each rank ends with: [rank, chunk, input].

    Raises:
        ScheduleError: An end without its other end, a circular wait, or an operation that touches
            chunks which another one may be using.
    """
    wire = _Wire(schedule)
    ranks = [_Rank(schedule, rank) for rank in range(schedule.size)]
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            for index, batch in rank.startable():
                rank.start(index, batch, wire)
                moved = True
        for rank in ranks:
            for index, batch in rank.started():
                if all(wire.matched(rank.number, place, op) for place, op in _placed(index, batch)):
                    rank.finish(index, batch, wire)
                    moved = True
    # An end whose other end never comes keeps its rank from getting through, too.
    stuck = [rank for rank in ranks if not rank.through]
    if stuck:
        raise ScheduleError(_circle(schedule, stuck, wire))
    return np.stack([rank.held for rank in ranks])


Place = tuple[int, int]
"""An operation of a rank: its round, and where it stands in it."""


def _placed(index: int, batch: Round) -> Iterator[tuple[Place, Op]]:
    return (((index, i), op) for i, op in enumerate(batch.ops))


class _Rank:
    """One rank on its way through its rounds."""

    def __init__(self, schedule: Schedule, number: int) -> None:
        self.number = number
        self._schedule = schedule
        self._rounds = rounds(schedule, number)
        self._todo: dict[int, list[int]] = defaultdict(list)
        for index, batch in enumerate(self._rounds):
            self._todo[batch.lane].append(index)
        self.running: set[int] = set()
        self._done: set[int] = set()
        self.held: Counts = np.zeros((schedule.num_chunks, schedule.size), dtype=np.int64)
        self.held[:, number] = 1
        self._usage = _Usage(schedule, number, list(self._todo))

    @property
    def through(self) -> bool:
        return not any(self._todo.values())

    def startable(self) -> list[tuple[int, Round]]:
        heads = [indices[0] for indices in self._todo.values() if indices]
        free = [index for index in heads if self._done.issuperset(self._rounds[index].waits)]
        return [(i, self._rounds[i]) for i in sorted(free) if i not in self.running]

    def started(self) -> list[tuple[int, Round]]:
        return [(index, self._rounds[index]) for index in sorted(self.running)]

    def start(self, index: int, batch: Round, wire: "_Wire") -> None:
        self.running.add(index)
        self._usage.enter(index, batch)
        for place, op in _placed(index, batch):
            payload = self.held[op.start : op.stop].copy() if op.action is Action.SEND else None
            wire.post(self.number, place, op, payload)

    def finish(self, index: int, batch: Round, wire: "_Wire") -> None:
        for place, op in _placed(index, batch):
            payload = wire.take(self.number, place, op)
            if op.action is Action.ADD:
                self.held[op.start : op.stop] += payload
            elif op.action is Action.COPY:
                self.held[op.start : op.stop] = payload
        self.running.remove(index)
        self._done.add(index)
        self._todo[batch.lane].pop(0)


class _Usage:
    """Who touched which chunk last, lane by lane, and what each round may take as done."""

    def __init__(self, schedule: Schedule, rank: int, lanes: list[int]) -> None:
        self._where = f"{schedule.name} for {schedule.size} ranks: rank {rank}"
        self._row = {lane: row for row, lane in enumerate(lanes)}
        self._begun = np.zeros(len(lanes), dtype=np.int64)
        self._read = np.zeros((len(lanes), schedule.num_chunks), dtype=np.int64)
        self._wrote = np.zeros_like(self._read)
        self._clocks: dict[int, Counts] = {}
        self._lane_clock = np.zeros((len(lanes), len(lanes)), dtype=np.int64)

    def enter(self, index: int, batch: Round) -> None:
        row = self._row[batch.lane]
        clock = self._lane_clock[row].copy()
        for needed in batch.waits:
            np.maximum(clock, self._clocks[needed], out=clock)
        for op in batch.ops:
            if len(self._row) > 1:
                self._check_lanes(op, clock)
            if op.action is Action.COPY:
                self._check_round(op, batch)
        self._begun[row] += 1
        for op in batch.ops:
            kind = self._read if op.action is Action.SEND else self._wrote
            kind[row, op.start : op.stop] = self._begun[row]
        clock[row] = self._begun[row]
        self._clocks[index] = clock
        self._lane_clock[row] = clock

    def _check_lanes(self, op: Op, clock: Counts) -> None:
        chunks = slice(op.start, op.stop)
        known = clock[:, None]
        fresh = op.action is not Action.SEND and bool((self._read[:, chunks] > known).any())
        if fresh or bool((self._wrote[:, chunks] > known).any()):
            raise ScheduleError(
                f"{self._where} does {op} while another lane may still be at these chunks"
            )

    def _check_round(self, op: Op, batch: Round) -> None:
        """A copy lands in place, so nothing else of its round may touch the same chunks."""
        for other in batch.ops:
            if other is not op and op.start < other.stop and other.start < op.stop:
                raise ScheduleError(
                    f"{self._where} copies into chunks {op.start}..{op.stop} in the round in "
                    f"which it also does {other}"
                )


class _Wire:
    """Both ends of every message so far; the k-th send of a route meets the k-th receive."""

    def __init__(self, schedule: Schedule) -> None:
        self._name = f"{schedule.name} for {schedule.size} ranks"
        self._sent: dict[Route, list[tuple[Op, Counts]]] = defaultdict(list)
        self._awaited: dict[Route, list[Op]] = defaultdict(list)
        self._turn: dict[tuple[int, Place], int] = {}

    def post(self, rank: int, place: Place, op: Op, payload: Counts | None) -> None:
        route = _route(rank, op)
        if payload is not None:
            self._sent[route].append((op, payload))
            self._turn[rank, place] = len(self._sent[route]) - 1
        else:
            self._awaited[route].append(op)
            self._turn[rank, place] = len(self._awaited[route]) - 1

    def matched(self, rank: int, place: Place, op: Op) -> bool:
        route = _route(rank, op)
        there = len(self._awaited[route] if op.action is Action.SEND else self._sent[route])
        return there > self._turn[rank, place]

    def take(self, rank: int, place: Place, op: Op) -> Counts:
        """Return what arrives, or what left, once both ends are known to fit."""
        route, turn = _route(rank, op), self._turn[rank, place]
        (source, payload), target = self._sent[route][turn], self._awaited[route][turn]
        if (source.start, source.stop) != (target.start, target.stop):
            raise ScheduleError(
                f"{self._name}: chunks {source.start}..{source.stop} are sent where "
                f"{target.start}..{target.stop} are expected (message {turn} from rank {route[0]} "
                f"to {route[1]})"
            )
        return payload


def _route(rank: int, op: Op) -> Route:
    return (rank, op.peer, op.lane) if op.action is Action.SEND else (op.peer, rank, op.lane)


def _own(schedule: Schedule, shards: int | None) -> NDArray[np.bool_]:
    """Return whose chunk is whose: [rank, chunk]."""
    n, shards = schedule.size, shards or schedule.size
    if n % shards or schedule.num_chunks % shards:
        raise ScheduleError(
            f"{schedule.name} for {n} ranks: {schedule.num_chunks} chunks cannot be shared out "
            f"among every {shards} ranks"
        )
    own = np.zeros((n, schedule.num_chunks), dtype=np.bool_)
    for rank in range(n):
        own[rank, list(owned(schedule, rank, shards))] = True
    return own


def _compare(schedule: Schedule, held: Counts, wanted: Counts) -> None:
    wrong = np.argwhere(held != wanted)
    if wrong.size:
        rank, chunk, source = wrong[0]
        raise ScheduleError(
            f"{schedule.name} for {schedule.size} ranks: chunk {chunk} of rank {rank} holds the "
            f"input of rank {source} {held[rank, chunk, source]} times"
        )


def _circle(schedule: Schedule, stuck: list[_Rank], wire: _Wire) -> str:
    waits = []
    for rank in stuck:
        peers = {
            op.peer
            for index, batch in rank.started()
            for place, op in _placed(index, batch)
            if not wire.matched(rank.number, place, op)
        }
        waits.append(f"rank {rank.number} for {sorted(peers)}")
    return f"{schedule.name} for {schedule.size} ranks: nobody can go on: {', '.join(waits)}"

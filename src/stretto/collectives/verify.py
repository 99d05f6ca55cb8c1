"""Verifies schedules without sending anything: each input is counted once, and nothing deadlocks.

The programs of all ranks are executed symbolically. A message blocks until both its ends have been
posted, as in the strictest back end, so a schedule that passes cannot deadlock on any back end. Two
lanes may touch the same chunks only if one operation is certain to end before the other starts.
"""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from stretto.collectives.schedule import Action, Op, Round, Schedule, rounds
from stretto.errors import ScheduleError

Counts = NDArray[np.int64]
Route = tuple[int, int, int]
"""(source, destination, lane)"""


def verify_allreduce(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every rank ends with every input exactly once."""
    _check_contributions(schedule, contributions(schedule), np.ones((1, 1, 1), dtype=np.int64))


def verify_broadcast(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every rank ends with the input of rank 0 and nothing else."""
    _check_contributions(
        schedule, contributions(schedule), np.eye(1, schedule.size, dtype=np.int64)[None]
    )


def verify_reduce_scatter(schedule: Schedule, shards: int | None = None) -> None:
    """Raise `ScheduleError` unless each rank's own chunks hold every input exactly once.

    ``shards`` is as in `owned_chunks`. The sums are over all ranks, whatever it is.
    """
    held = contributions(schedule)
    expected = np.where(_owner_matrix(schedule, shards)[:, :, None], 1, held)
    _check_contributions(schedule, held, expected)


def verify_all_gather(schedule: Schedule, shards: int | None = None) -> None:
    """Raise `ScheduleError` unless every rank ends with each chunk as its owner had it.

    ``shards`` is as in `owned_chunks`. A chunk then has several owners; the one that counts is in
    the rank's own group of ``shards`` ranks.
    """
    shard_groups = np.arange(schedule.size) // (shards or schedule.size)
    in_same_group = shard_groups[:, None] == shard_groups
    expected = in_same_group[:, None, :] & _owner_matrix(schedule, shards).T
    _check_contributions(schedule, contributions(schedule), expected.astype(np.int64))


def owned_chunks(schedule: Schedule, rank: int, shards: int | None = None) -> range:
    """Return the chunks that ``rank`` owns after a reduce-scatter or before an all-gather.

    Every ``shards`` consecutive ranks divide the whole tensor among them, as the ranks of a host
    do when each host has a full copy. None means that all ranks divide one tensor.
    """
    shards = shards or schedule.size
    chunks_per_owner = schedule.num_chunks // shards
    position = rank % shards
    return range(position * chunks_per_owner, (position + 1) * chunks_per_owner)


def contributions(schedule: Schedule) -> Counts:
    """Return how often each rank's final chunks contain each rank's input: [rank, chunk, input].

    Raises:
        ScheduleError: A send without its receive or the reverse, a deadlock, or an operation that
            touches chunks which another one may be using.
    """
    messages = _MessageMatcher(schedule)
    ranks = [_RankProgress(schedule, rank) for rank in range(schedule.size)]
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for rank in ranks:
            for index, round_ in rank.startable_rounds():
                rank.start(index, round_, messages)
                has_progressed = True
        for rank in ranks:
            for index, round_ in rank.running_rounds():
                if all(
                    messages.is_matched(rank.number, position, op)
                    for position, op in _positions(index, round_)
                ):
                    rank.finish(index, round_, messages)
                    has_progressed = True
    # A send or receive without its counterpart also leaves its rank unfinished.
    blocked_ranks = [rank for rank in ranks if not rank.is_finished]
    if blocked_ranks:
        raise ScheduleError(_describe_deadlock(schedule, blocked_ranks, messages))
    return np.stack([rank.held for rank in ranks])


OpPosition = tuple[int, int]
"""An operation of a rank: (index of its round, index in the round)."""


def _positions(index: int, round_: Round) -> Iterator[tuple[OpPosition, Op]]:
    return (((index, i), op) for i, op in enumerate(round_.ops))


class _RankProgress:
    """The state of one rank: the rounds done and running, and the inputs in each chunk."""

    def __init__(self, schedule: Schedule, number: int) -> None:
        self.number = number
        self._schedule = schedule
        self._rounds = rounds(schedule, number)
        self._todo: dict[int, list[int]] = defaultdict(list)
        for index, round_ in enumerate(self._rounds):
            self._todo[round_.lane].append(index)
        self.running: set[int] = set()
        self._done: set[int] = set()
        self.held: Counts = np.zeros((schedule.num_chunks, schedule.size), dtype=np.int64)
        self.held[:, number] = 1
        self._usage = _ChunkUsage(schedule, number, list(self._todo))

    @property
    def is_finished(self) -> bool:
        return not any(self._todo.values())

    def startable_rounds(self) -> list[tuple[int, Round]]:
        heads = [indices[0] for indices in self._todo.values() if indices]
        free = [index for index in heads if self._done.issuperset(self._rounds[index].waits_for)]
        return [(i, self._rounds[i]) for i in sorted(free) if i not in self.running]

    def running_rounds(self) -> list[tuple[int, Round]]:
        return [(index, self._rounds[index]) for index in sorted(self.running)]

    def start(self, index: int, round_: Round, messages: "_MessageMatcher") -> None:
        self.running.add(index)
        self._usage.record_round(index, round_)
        for position, op in _positions(index, round_):
            payload = self.held[op.start : op.stop].copy() if op.action is Action.SEND else None
            messages.post_op(self.number, position, op, payload)

    def finish(self, index: int, round_: Round, messages: "_MessageMatcher") -> None:
        for position, op in _positions(index, round_):
            payload = messages.take_payload(self.number, position, op)
            if op.action is Action.ADD:
                self.held[op.start : op.stop] += payload
            elif op.action is Action.COPY:
                self.held[op.start : op.stop] = payload
        self.running.remove(index)
        self._done.add(index)
        self._todo[round_.lane].pop(0)


class _ChunkUsage:
    """Detects races between lanes of one rank, with a vector clock for each round.

    A clock says how many rounds of each lane are certain to have ended before the round starts.
    """

    def __init__(self, schedule: Schedule, rank: int, lanes: list[int]) -> None:
        self._where = f"{schedule.name} for {schedule.size} ranks: rank {rank}"
        self._row = {lane: row for row, lane in enumerate(lanes)}
        self._rounds_begun = np.zeros(len(lanes), dtype=np.int64)
        self._read = np.zeros((len(lanes), schedule.num_chunks), dtype=np.int64)
        self._wrote = np.zeros_like(self._read)
        self._clocks: dict[int, Counts] = {}
        self._lane_clock = np.zeros((len(lanes), len(lanes)), dtype=np.int64)

    def record_round(self, index: int, round_: Round) -> None:
        row = self._row[round_.lane]
        clock = self._lane_clock[row].copy()
        for needed in round_.waits_for:
            np.maximum(clock, self._clocks[needed], out=clock)
        for op in round_.ops:
            if len(self._row) > 1:
                self._check_lanes(op, clock)
            if op.action is Action.COPY:
                self._check_round(op, round_)
        self._rounds_begun[row] += 1
        for op in round_.ops:
            kind = self._read if op.action is Action.SEND else self._wrote
            kind[row, op.start : op.stop] = self._rounds_begun[row]
        clock[row] = self._rounds_begun[row]
        self._clocks[index] = clock
        self._lane_clock[row] = clock

    def _check_lanes(self, op: Op, clock: Counts) -> None:
        chunks = slice(op.start, op.stop)
        ended = clock[:, None]
        is_still_read = op.action is not Action.SEND and bool((self._read[:, chunks] > ended).any())
        if is_still_read or bool((self._wrote[:, chunks] > ended).any()):
            raise ScheduleError(
                f"{self._where} does {op} while another lane may still be using these chunks"
            )

    def _check_round(self, op: Op, round_: Round) -> None:
        """Check that nothing else of the round touches the chunks of a copy, received in place."""
        for other in round_.ops:
            if other is not op and op.start < other.stop and other.start < op.stop:
                raise ScheduleError(
                    f"{self._where} copies into chunks {op.start}..{op.stop} in the round in "
                    f"which it also does {other}"
                )


class _MessageMatcher:
    """Matches the k-th send of each route with its k-th receive."""

    def __init__(self, schedule: Schedule) -> None:
        self._name = f"{schedule.name} for {schedule.size} ranks"
        self._sent: dict[Route, list[tuple[Op, Counts]]] = defaultdict(list)
        self._awaited: dict[Route, list[Op]] = defaultdict(list)
        self._message_index: dict[tuple[int, OpPosition], int] = {}

    def post_op(self, rank: int, position: OpPosition, op: Op, payload: Counts | None) -> None:
        route = _route(rank, op)
        if payload is not None:
            self._sent[route].append((op, payload))
            self._message_index[rank, position] = len(self._sent[route]) - 1
        else:
            self._awaited[route].append(op)
            self._message_index[rank, position] = len(self._awaited[route]) - 1

    def is_matched(self, rank: int, position: OpPosition, op: Op) -> bool:
        route = _route(rank, op)
        num_posted = len(self._awaited[route] if op.action is Action.SEND else self._sent[route])
        return num_posted > self._message_index[rank, position]

    def take_payload(self, rank: int, position: OpPosition, op: Op) -> Counts:
        """Return the payload of a matched message.

        Raises:
            ScheduleError: The two ends name different chunks.
        """
        route, message_index = _route(rank, op), self._message_index[rank, position]
        (source, payload), target = (
            self._sent[route][message_index],
            self._awaited[route][message_index],
        )
        if (source.start, source.stop) != (target.start, target.stop):
            raise ScheduleError(
                f"{self._name}: chunks {source.start}..{source.stop} are sent where "
                f"{target.start}..{target.stop} are expected (message {message_index} from rank "
                f"{route[0]} to {route[1]})"
            )
        return payload


def _route(rank: int, op: Op) -> Route:
    return (rank, op.peer, op.lane) if op.action is Action.SEND else (op.peer, rank, op.lane)


def _owner_matrix(schedule: Schedule, shards: int | None) -> NDArray[np.bool_]:
    """Return whether each rank owns each chunk: [rank, chunk]."""
    n, shards = schedule.size, shards or schedule.size
    if n % shards or schedule.num_chunks % shards:
        raise ScheduleError(
            f"{schedule.name} for {n} ranks: {schedule.num_chunks} chunks cannot be divided "
            f"among every {shards} ranks"
        )
    is_owner = np.zeros((n, schedule.num_chunks), dtype=np.bool_)
    for rank in range(n):
        is_owner[rank, list(owned_chunks(schedule, rank, shards))] = True
    return is_owner


def _check_contributions(schedule: Schedule, held: Counts, expected: Counts) -> None:
    wrong = np.argwhere(held != expected)
    if wrong.size:
        rank, chunk, source = wrong[0]
        raise ScheduleError(
            f"{schedule.name} for {schedule.size} ranks: chunk {chunk} of rank {rank} holds the "
            f"input of rank {source} {held[rank, chunk, source]} times"
        )


def _describe_deadlock(
    schedule: Schedule, blocked_ranks: list[_RankProgress], messages: _MessageMatcher
) -> str:
    waits_for = []
    for rank in blocked_ranks:
        peers = {
            op.peer
            for index, round_ in rank.running_rounds()
            for position, op in _positions(index, round_)
            if not messages.is_matched(rank.number, position, op)
        }
        waits_for.append(f"rank {rank.number} for {sorted(peers)}")
    waits = ", ".join(waits_for)
    return f"{schedule.name} for {schedule.size} ranks: deadlock, these ranks wait: {waits}"

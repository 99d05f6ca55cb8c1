"""The messages of an operation: what one rank sends, to whom, on which lane.

The same rules as in `stretto.comm`, which runs the operations: chunks of a schedule, shards of a
group, one message for each peer. Messages without elements are not sent.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from stretto.collectives.schedule import Action, Schedule, chunk_bounds
from stretto.program.step_program import (
    NATIVE_LANE,
    GroupGather,
    Operation,
    PairCall,
    Payload,
    PeerRound,
)
from stretto.topology.round_peers import RoundPeers, shift_edges

SIGNAL_BYTES = 4
"""A signal that begins or ends an average of a pair."""


class Message(NamedTuple):
    """One message of a rank: to ``peer``, or into the back end's own all-reduce (``peer`` -1)."""

    peer: int
    num_bytes: int
    lane: int


def messages_of(operation: Operation, rank: int, size: int) -> list[Message]:
    """Return what ``rank`` of ``size`` sends in ``operation``, in order on each lane."""
    route, payload = operation.route, operation.payload
    if route is None:
        return [Message(-1, payload.num_bytes, NATIVE_LANE)]
    if isinstance(route, Schedule):
        if route.native:
            return [Message(-1, payload.num_bytes, NATIVE_LANE)]
        return list(_schedule_messages(route, payload, rank))
    lane = operation.lane
    if isinstance(route, PeerRound):
        peers = peers_in_round(route, rank)
        num_bytes = _shard_bytes(payload, route.width)[rank % route.width]
        return [Message(edge.rank, num_bytes, lane) for edge in peers.sends if num_bytes]
    if isinstance(route, GroupGather):
        return list(_gather_messages(route, payload, rank, lane))
    return list(_call_messages(route, rank, size, lane))


def partners_of(operation: Operation, rank: int, size: int) -> set[int]:
    """Return the ranks without which ``rank`` cannot finish its part of ``operation``."""
    route = operation.route
    if isinstance(route, PeerRound):
        peers = peers_in_round(route, rank)
        return {edge.rank for edge in (*peers.sends, *peers.receives)} - {rank}
    if isinstance(route, GroupGather):
        gathers = bool(peers_in_round(route.round, rank).receives)
        return set(_members(rank, route.round.width)) - {rank} if gathers else set()
    if isinstance(route, PairCall):
        return set()
    if route is None or route.native:
        return set(range(size)) - {rank}
    return {op.peer for op in route.program(rank)} - {rank}


def peers_in_round(route: PeerRound, rank: int) -> RoundPeers:
    """Return the peers of ``rank``: the members of peer groups with its number in the group."""
    width = route.width
    group, member = divmod(rank, width)
    peers = route.topology(group, route.groups, route.number, route.segment)
    sends, receives = (shift_edges(e, member, width) for e in (peers.sends, peers.receives))
    return RoundPeers(peers.self_weight, sends, receives)


def _schedule_messages(schedule: Schedule, payload: Payload, rank: int) -> Iterator[Message]:
    bounds = chunk_bounds(payload.numel, schedule.num_chunks)
    lengths = [stop - start for start, stop in pairwise(bounds)]
    for op in schedule.program(rank):
        if op.action is not Action.SEND or bounds[op.start] == bounds[op.stop]:
            continue
        if payload.codec is not None:
            num_bytes = payload.codec.num_bytes(lengths[op.start : op.stop])
        else:
            num_bytes = (bounds[op.stop] - bounds[op.start]) * payload.element_bytes
        yield Message(op.peer, num_bytes, op.lane)


def _shard_bytes(payload: Payload, width: int) -> list[int]:
    """Return the bytes of the shard of each member of a group."""
    numels = [stop - start for start, stop in pairwise(chunk_bounds(payload.numel, width))]
    if payload.codec is not None:
        return [payload.codec.num_bytes([numel]) for numel in numels]
    return [numel * payload.element_bytes for numel in numels]


def _gather_messages(
    route: GroupGather, payload: Payload, rank: int, lane: int
) -> Iterator[Message]:
    width = route.round.width
    num_bytes = _shard_bytes(payload, width)[rank % width]
    if num_bytes and peers_in_round(route.round, rank).receives:
        for member in _members(rank, width):
            if member != rank:
                yield Message(member, num_bytes, lane)


def _call_messages(route: PairCall, rank: int, size: int, lane: int) -> Iterator[Message]:
    passive = route.peer_of(rank, size, route.step)
    if passive is not None:
        yield Message(passive, SIGNAL_BYTES, lane)
        for num_bytes in route.tensor_bytes:
            yield Message(passive, num_bytes, lane)
    for active in range(size):
        if route.peer_of(active, size, route.step) == rank:
            for num_bytes in route.tensor_bytes:
                yield Message(active, num_bytes, lane)
            yield Message(active, SIGNAL_BYTES, lane)


def _members(rank: int, width: int) -> range:
    first = rank - rank % width
    return range(first, first + width)


def lanes_of(operation: Operation, size: int) -> tuple[int, ...]:
    """Return the lanes that the ranks use in ``operation``."""
    route = operation.route
    if not isinstance(route, Schedule):
        return (operation.lane,)
    if route.native:
        return (NATIVE_LANE,)
    representatives = range(min(route.period or size, size))
    return tuple(sorted({op.lane for rank in representatives for op in route.program(rank)}))

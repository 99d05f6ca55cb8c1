"""Take part in the meeting: join the store, answer the roll, visit the others, tell the speaker."""

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from stretto.cluster.store import join_store
from stretto.cluster.world import World
from stretto.doctor.door import CONNECT_S, opened
from stretto.doctor.records import Clock, Door, Examination, Facts, Purpose, Round
from stretto.doctor.roll import (
    CLOCK_S,
    Board,
    call_the_roll,
    compare_clocks,
    share,
    shared,
    ticking,
    wait_until,
)
from stretto.doctor.rounds import ROUND_S, go_round, peers_to_visit
from stretto.errors import LaunchError

GOODBYE_S = 1.0
AFTER_ROLL_S = CLOCK_S + ROUND_S + GOODBYE_S
"""The longest that what follows the roll call takes."""

T = TypeVar("T")

_FACTS: TypeAdapter[Facts] = TypeAdapter(Facts)
_DOOR: TypeAdapter[Door | None] = TypeAdapter(Door | None)
_ROUND: TypeAdapter[Round] = TypeAdapter(Round)


def join(world: World, facts: Facts, deadline_s: float) -> Board:
    """Return the board once the store's port answers; say what was tried when it does not."""
    meeting = world.meeting
    if meeting is not None and not (meeting.held_by_rank_0 and world.rank == 0):
        reason = _knock_until(meeting.host, meeting.port, deadline_s)
        if reason:
            raise LaunchError(
                f"rank {world.rank} on host {facts.place.host} cannot reach the store at "
                f"{meeting.host}:{meeting.port} over {facts.network.towards or 'any interface'} "
                f"({facts.network.address or 'no address'}): {reason}; is rank 0 or the launcher "
                f"running there? open TCP port {meeting.port} on that host, or set MASTER_ADDR "
                "to an address that this host can reach"
            )
    left_s = max(1.0, deadline_s - time.monotonic())
    return Board(join_store(world, left_s), world.generation)


def _knock_until(host: str, port: int, deadline_s: float) -> str:
    """Return why nothing accepts connections there by the deadline; nothing once something does."""
    reasons: list[str] = []

    def answers() -> bool:
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError as failure:
            reasons.append(str(failure.strerror or failure).lower())
            return False
        return True

    return "" if wait_until(answers, deadline_s) else reasons[-1]


def attend(
    board: Board, world: World, facts: Facts, purpose: Purpose, deadline_s: float
) -> Examination | None:
    """Tell, listen and visit together with all others; return everything if we are the speaker."""
    rank = world.rank
    if board.count(f"claim/{rank}") > 1:
        share(board, "double", rank, f"host {facts.place.host}, process {facts.place.pid}")
        raise LaunchError(
            f"rank {rank} is there twice: this process on host {facts.place.host} is the second; "
            "give every process a rank of its own"
        )
    with opened(facts.network.address, rank, secrets.token_hex(8)) as door:
        share(board, "facts", rank, _FACTS.dump_json(facts).decode())
        share(board, "door", rank, _DOOR.dump_json(door).decode())
        came = call_the_roll(board, rank, world.size, deadline_s)
        limit_s = time.monotonic() + CLOCK_S + ROUND_S
        if rank == came[0]:
            return _speak(board, world, purpose, came, limit_s)
        _report(board, world, came, compare_clocks(board))
        wait_until(lambda: board.has("bye"), limit_s)
        board.count("left")
        return None


def _report(board: Board, world: World, came: Sequence[int], clock: Clock | None = None) -> None:
    peers = peers_to_visit(world.rank, world.mesh, came)
    # All of them are there already: a door is put up before its rank counts as having come.
    doors = _understood(_DOOR, shared(board, "door", peers, time.monotonic()))
    share(board, "round", world.rank, _ROUND.dump_json(Round(go_round(doors), clock)).decode())


def _speak(
    board: Board, world: World, purpose: Purpose, came: Sequence[int], limit_s: float
) -> Examination:
    """Let the others read our clock while we visit them; take what all have to tell."""
    with ticking(board):
        _report(board, world, came)
        rounds = shared(board, "round", came, limit_s)
    facts = shared(board, "facts", came, limit_s)
    doubles = shared(board, "double", came, 0)
    board.post("bye", "")
    # Whoever holds the store takes it along: nobody should find it gone while still looking.
    goodbye_s = time.monotonic() + GOODBYE_S
    wait_until(lambda: board.count("left", 0) >= len(came) - 1, goodbye_s)
    return Examination(
        purpose=purpose,
        size=world.size,
        speaker=world.rank,
        facts=_understood(_FACTS, facts),
        rounds=_understood(_ROUND, rounds),
        came=tuple(came),
        doubles=doubles,
    )


def _understood(adapter: TypeAdapter[T], texts: Mapping[int, str]) -> dict[int, T]:
    """Return what can be read; a rank that runs other code may speak otherwise."""
    read = {}
    for rank, text in texts.items():
        try:
            read[rank] = adapter.validate_json(text)
        except ValidationError:
            continue
    return read

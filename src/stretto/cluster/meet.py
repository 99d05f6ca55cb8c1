"""The roll call: every rank says who it is, rank 0 compares, all learn the mesh or what disagrees.

Launchers tell a rank its own number; how many ranks the other hosts have, and whether everybody
was started as part of the same job, only the ranks themselves can find out.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import groupby

from torch._C._distributed_c10d import PrefixStore, Store

from stretto.cluster.address import with_address
from stretto.cluster.store import join_store
from stretto.cluster.world import Mesh, World
from stretto.errors import LaunchError
from stretto.telemetry.wording import ranks_in_words

_ANSWER_S = 10.0
"""Rank 0 answers when its own patience ends; the others wait this much longer to hear it."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank says of itself at the roll call."""

    rank: int
    size: int
    host_name: str
    launcher: str
    job: str


@dataclass(frozen=True, slots=True)
class Met:
    """A rank after the roll call: its world, with the mesh as it is, and its store."""

    world: World
    store: Store


_met: dict[World, Met] = {}
"""A process meets once in a world, however many channels it opens there."""


def meet(world: World, timeout_s: float = 300.0) -> Met:
    """Join the others; return with all of them, or say who misses or disagrees.

    Raises:
        LaunchError: Ranks are missing, or were started as parts of different jobs.
    """
    if world not in _met:
        met = _meet(with_address(world), timeout_s)
        _met[world] = _met[met.world] = met
    return _met[world]


def _meet(world: World, timeout_s: float) -> Met:
    store = join_store(world, timeout_s)
    if world.meeting is None:
        return Met(world, store)
    room = PrefixStore(f"meet/{world.generation}", store)
    room.set(f"card/{world.rank}", json.dumps(asdict(card_of(world))))
    if world.rank == 0:
        room.set("mesh", _answer(room, world, timeout_s))
    where = f"{world.meeting.host}:{world.meeting.port}"
    answer = json.loads(_wait(room, "mesh", timeout_s + _ANSWER_S, where))
    if "wrong" in answer:
        raise LaunchError(answer["wrong"])
    return Met(replace(world, mesh=Mesh(tuple(answer["mesh"]))), store)


def card_of(world: World) -> Card:
    """Return what this rank says."""
    return Card(world.rank, world.size, world.host_name, world.launcher, world.job)


def settle_mesh(cards: Sequence[Card]) -> Mesh:
    """Return the mesh that the cards of all ranks, in order, describe.

    Raises:
        LaunchError: Two cards disagree; it names them.
    """
    first = cards[0]
    for card in cards[1:]:
        for field in ("size", "launcher", "job"):
            mine, theirs = getattr(first, field), getattr(card, field)
            if mine != theirs:
                raise LaunchError(
                    f"rank 0 and rank {card.rank} were started differently: {field} {mine!r} and "
                    f"{theirs!r}; is an older job still running at this meeting point? another "
                    "MASTER_PORT keeps them apart"
                )
    runs = [(name, len(list(run))) for name, run in groupby(cards, key=lambda card: card.host_name)]
    if len({name for name, _ in runs}) < len(runs):
        names = [card.host_name for card in cards]
        twice = next(name for name in names if sum(run == name for run, _ in runs) > 1)
        raise LaunchError(
            f"ranks of host {twice!r} are not numbered one after another: start ranks host after "
            "host (mpirun --map-by slot, srun --distribution=block)"
        )
    return Mesh(tuple(count for _, count in runs))


def _answer(room: Store, world: World, timeout_s: float) -> str:
    """Rank 0: take all cards; return the mesh, or what is wrong, for everybody."""
    try:
        mesh = settle_mesh(_take_cards(room, world.size, timeout_s))
    except LaunchError as wrong:
        return json.dumps({"wrong": str(wrong)})
    return json.dumps({"mesh": mesh.ranks_per_host})


def _take_cards(room: Store, size: int, timeout_s: float) -> list[Card]:
    keys = [f"card/{rank}" for rank in range(size)]
    try:
        room.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not room.check([key])]
        raise LaunchError(
            f"{ranks_in_words(missing)} of {size} did not come to the meeting within "
            f"{timeout_s:g} s: look into their logs, or run `stretto doctor` the same way"
        ) from None
    return [Card(**json.loads(room.get(key))) for key in keys]


def _wait(room: Store, key: str, timeout_s: float, where: str) -> bytes:
    try:
        room.wait([key], timedelta(seconds=timeout_s))
        answer: bytes = room.get(key)
    except RuntimeError as failure:
        raise LaunchError(
            f"rank 0 did not answer the roll call at {where} within {timeout_s:g} s: look into its "
            "log, or run `stretto doctor` the same way"
        ) from failure
    return answer

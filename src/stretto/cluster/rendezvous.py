"""Rendezvous: each rank publishes its `RankInfo`, rank 0 compares them, all receive the mesh.

A launcher gives each process its own rank only. The ranks themselves must find out how many ranks
each host has, and whether all of them were started as part of the same job.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import groupby

from torch._C._distributed_c10d import PrefixStore, Store

from stretto.cluster.interfaces import resolve_store_host
from stretto.cluster.store import start_or_connect_store
from stretto.cluster.world import Mesh, World
from stretto.errors import LaunchError
from stretto.telemetry.event_text import ranks_text

_REPLY_MARGIN_S = 10.0
"""Rank 0 replies after its own timeout at the latest; the others wait this much longer for it."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The facts about itself that a rank publishes at the rendezvous."""

    rank: int
    size: int
    host_name: str
    launcher: str
    job: str


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The result of a rendezvous: the world with its real mesh, and a store connection."""

    world: World
    store: Store


_rendezvous_by_world: dict[World, Rendezvous] = {}
"""One rendezvous for each world in a process, however many transports it opens."""


def rendezvous(world: World, timeout_s: float = 300.0) -> Rendezvous:
    """Wait until all ranks of ``world`` have joined; return the real mesh and the store.

    Later calls for the same world return the first result.

    Raises:
        LaunchError: Ranks are missing after ``timeout_s``, or were started as parts of different
            jobs; it names them.
    """
    if world not in _rendezvous_by_world:
        joined = _rendezvous(resolve_store_host(world), timeout_s)
        _rendezvous_by_world[world] = _rendezvous_by_world[joined.world] = joined
    return _rendezvous_by_world[world]


def _rendezvous(world: World, timeout_s: float) -> Rendezvous:
    store = start_or_connect_store(world, timeout_s)
    if world.store_address is None:
        return Rendezvous(world, store)
    rendezvous_store = PrefixStore(f"rendezvous/{world.generation}", store)
    rendezvous_store.set(f"rank-info/{world.rank}", json.dumps(asdict(rank_info_of(world))))
    if world.rank == 0:
        rendezvous_store.set("mesh", _rank_0_reply(rendezvous_store, world, timeout_s))
    address = f"{world.store_address.host}:{world.store_address.port}"
    reply = json.loads(
        _wait_for_reply(rendezvous_store, "mesh", timeout_s + _REPLY_MARGIN_S, address)
    )
    if "error" in reply:
        raise LaunchError(reply["error"])
    return Rendezvous(replace(world, mesh=Mesh(tuple(reply["mesh"]))), store)


def rank_info_of(world: World) -> RankInfo:
    """Return the facts that this rank publishes."""
    return RankInfo(world.rank, world.size, world.host_name, world.launcher, world.job)


def mesh_from_rank_infos(rank_infos: Sequence[RankInfo]) -> Mesh:
    """Return the mesh that ``rank_infos`` of all ranks, in rank order, describe.

    Raises:
        LaunchError: Two ranks disagree, or a host's ranks are not numbered consecutively.
    """
    first = rank_infos[0]
    for rank_info in rank_infos[1:]:
        for field in ("size", "launcher", "job"):
            first_value, other_value = getattr(first, field), getattr(rank_info, field)
            if first_value != other_value:
                raise LaunchError(
                    f"rank 0 and rank {rank_info.rank} were started differently: {field} "
                    f"{first_value!r} and {other_value!r}; if an older job still uses this store, "
                    "set another MASTER_PORT"
                )
    runs = [
        (name, len(list(run)))
        for name, run in groupby(rank_infos, key=lambda rank_info: rank_info.host_name)
    ]
    if len({name for name, _ in runs}) < len(runs):
        names = [rank_info.host_name for rank_info in rank_infos]
        repeated_host = next(name for name in names if sum(run == name for run, _ in runs) > 1)
        raise LaunchError(
            f"ranks of host {repeated_host!r} are not numbered one after another: start ranks "
            "host after host (mpirun --map-by slot, srun --distribution=block)"
        )
    return Mesh(tuple(count for _, count in runs))


def _rank_0_reply(rendezvous_store: Store, world: World, timeout_s: float) -> str:
    """Gather all rank infos on rank 0; return the mesh, or the error, as JSON for all ranks."""
    try:
        mesh = mesh_from_rank_infos(_gather_rank_infos(rendezvous_store, world.size, timeout_s))
    except LaunchError as wrong:
        return json.dumps({"error": str(wrong)})
    return json.dumps({"mesh": mesh.ranks_per_host})


def _gather_rank_infos(rendezvous_store: Store, size: int, timeout_s: float) -> list[RankInfo]:
    keys = [f"rank-info/{rank}" for rank in range(size)]
    try:
        rendezvous_store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not rendezvous_store.check([key])]
        raise LaunchError(
            f"{ranks_text(missing)} of {size} did not join the rendezvous within "
            f"{timeout_s:g} s: look into their logs, or run `stretto doctor` the same way"
        ) from None
    return [RankInfo(**json.loads(rendezvous_store.get(key))) for key in keys]


def _wait_for_reply(rendezvous_store: Store, key: str, timeout_s: float, address: str) -> bytes:
    try:
        rendezvous_store.wait([key], timedelta(seconds=timeout_s))
        reply: bytes = rendezvous_store.get(key)
    except RuntimeError as failure:
        raise LaunchError(
            f"rank 0 did not answer at the rendezvous {address} within {timeout_s:g} s: look into "
            "its log, or run `stretto doctor` the same way"
        ) from failure
    return reply

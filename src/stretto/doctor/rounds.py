"""One rank's round of visits: whom to visit, and how it went."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from stretto.cluster.world import Mesh
from stretto.doctor.door import ANSWER_S, CONNECT_S, knock
from stretto.doctor.records import Door, Visit

ALL_PAIRS_UP_TO = 32
"""Ranks up to which each visits each."""
AT_ONCE = 32
START_WITHIN_S = 2.0
"""A visit that could not begin by then is not made."""
ROUND_S = START_WITHIN_S + CONNECT_S + ANSWER_S
"""The longest that a round takes."""

NOT_TRIED = "not tried, too many others had to be waited for"


def peers_to_visit(rank: int, mesh: Mesh, came: Sequence[int]) -> list[int]:
    """Return whom ``rank`` visits: everybody in a small world.

    In a large one the first of each host visits the first of every other host, and each rank its
    two neighbours: every host is tried from every other, every rank's door from both sides.
    """
    others = [other for other in came if other != rank]
    if len(came) <= ALL_PAIRS_UP_TO:
        return others
    firsts = {mesh.host_of(other): other for other in sorted(came, reverse=True)}
    place = sorted(came).index(rank)
    neighbours = {sorted(came)[(place + side) % len(came)] for side in (-1, 1)}
    visited = neighbours | (set(firsts.values()) if rank in firsts.values() else set())
    return sorted(visited - {rank})


def go_round(doors: Mapping[int, Door | None]) -> tuple[Visit, ...]:
    """Knock at each door, many at once; return within ROUND_S however many do not answer."""
    start_by_s = time.monotonic() + START_WITHIN_S

    def visit(peer: int) -> Visit:
        door = doors[peer]
        if door is None:
            return Visit(peer, "", "it has no address to listen on")
        if time.monotonic() > start_by_s:
            return Visit(peer, f"{door.address}:{door.port}", NOT_TRIED)
        return Visit(peer, f"{door.address}:{door.port}", knock(door, peer))

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="stretto-doctor") as pool:
        return tuple(pool.map(visit, doors))

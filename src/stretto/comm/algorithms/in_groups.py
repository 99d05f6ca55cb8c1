"""All-reduce inside groups of ranks in a row: each ends with a sum of its own."""

from stretto.comm.algorithms.ring import ring
from stretto.comm.schedule import Placing, Program, Schedule
from stretto.errors import ScheduleError
from stretto.topology.grouped import members


def ring_in_groups(size: int, width: int, lane: int = 0) -> Schedule:
    """Sum around a ring of ``width`` ranks in each group, on one lane; nothing leaves a group.

    2(k-1) alpha + 2 (k-1)/k N beta, for groups of k. All of a group end with the same bits.
    """
    if size % width:
        raise ScheduleError(f"{size} ranks cannot be groups of {width}")
    inside = ring(width)

    def program(rank: int) -> Program:
        return Placing(members(rank // width, width), lane=lane).program(inside, rank)

    name = f"ring in groups of {width}"
    return Schedule(name, size, inside.num_chunks, program, period=width, turn=width)

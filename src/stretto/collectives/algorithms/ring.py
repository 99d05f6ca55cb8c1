"""Ring all-reduce, reduce-scatter and all-gather.

Costs are written with n ranks, N bytes, alpha seconds a message and beta seconds a byte.
"""

from collections.abc import Sequence

from stretto.collectives.schedule import (
    Action,
    Op,
    Program,
    Schedule,
    SubgroupMapping,
    pipeline_chunks,
)
from stretto.errors import ScheduleError
from stretto.topology.round_peers import ranks_of_group

RingPass = tuple[int, Action]
"""One pass around the ring: (the chunk that a rank sends first, its action on received chunks)."""


def ring(size: int, parts: int = 1) -> Schedule:
    """Ring all-reduce: each rank sends 2(n-1) messages of 1/n of the tensor to the next rank.

    Cost: 2(n-1) alpha + 2 (n-1)/n N beta, which is bandwidth-optimal with a latency linear in n;
    for large tensors. Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002.

    The first half is `ring_reduce_scatter`, the second `ring_all_gather`. Every chunk is summed by
    one owner and copied by the others, so all ranks end with the same bits.
    """

    def program(rank: int) -> Program:
        return _ring_program(rank, size, [(rank - 1, Action.ADD), (rank, Action.COPY)])

    return _pipeline_ring(Schedule("ring", size, size, program, period=1), parts)


def ring_reduce_scatter(size: int, parts: int = 1) -> Schedule:
    """Ring reduce-scatter: rank r ends with the sum of chunk r. (n-1) alpha + (n-1)/n N beta."""

    def program(rank: int) -> Program:
        return _ring_program(rank, size, [(rank - 1, Action.ADD)])

    return _pipeline_ring(Schedule("ring", size, size, program, period=1), parts)


def ring_all_gather(size: int, parts: int = 1, complete_rank: int | None = None) -> Schedule:
    """Ring all-gather: all ranks end with chunk r of every rank r. (n-1) alpha + (n-1)/n N beta.

    The rank ``complete_rank``, if there is one, has every chunk already and receives none.
    """

    def program(rank: int) -> Program:
        return _ring_program(rank, size, [(rank, Action.COPY)], complete_rank)

    period = 1 if complete_rank is None else None
    return _pipeline_ring(Schedule("ring", size, size, program, period=period), parts)


def _ring_program(
    rank: int, n: int, passes: Sequence[RingPass], complete_rank: int | None = None
) -> Program:
    """Return the program of ``passes`` around the ring, each of n-1 steps.

    In each step a rank sends the chunk that it received in the step before, so the numbers of the
    chunks sent and received go down by one.
    """
    next_rank, previous_rank = (rank + 1) % n, (rank - 1) % n
    sends, receives = next_rank != complete_rank, rank != complete_rank
    ops: list[Op] = []
    after: tuple[int, ...] = ()
    for first_sent_chunk, receive in passes:
        for step in range(n - 1):
            sent_chunk, received_chunk = (
                (first_sent_chunk - step) % n,
                (first_sent_chunk - step - 1) % n,
            )
            first = len(ops)
            if sends:
                ops.append(Op(Action.SEND, next_rank, sent_chunk, sent_chunk + 1, after))
            if receives:
                ops.append(Op(receive, previous_rank, received_chunk, received_chunk + 1, after))
            after = (first, first + 1) if sends and receives else (first,)
    return tuple(ops)


def _pipeline_ring(schedule: Schedule, parts: int) -> Schedule:
    # Two lanes: one slice is added while another is sent. More lanes were no faster.
    return pipeline_chunks(schedule, parts, width=min(parts, 2))


def ring_in_groups(size: int, width: int, lane: int = 0) -> Schedule:
    """Ring all-reduce inside each group of ``width`` consecutive ranks, on one lane.

    Cost: 2(k-1) alpha + 2 (k-1)/k N beta, with k = ``width``. The ranks of a group end with the
    same bits.

    Raises:
        ScheduleError: ``width`` does not divide ``size``.
    """
    if size % width:
        raise ScheduleError(f"{size} ranks cannot be divided into groups of {width}")
    group_ring = ring(width)

    def program(rank: int) -> Program:
        return SubgroupMapping(ranks_of_group(rank // width, width), lane=lane).program(
            group_ring, rank
        )

    name = f"ring in groups of {width}"
    return Schedule(name, size, group_ring.num_chunks, program, period=width, rotation_block=width)

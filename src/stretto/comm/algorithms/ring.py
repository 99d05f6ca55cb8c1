"""Rings: all-reduce, reduce-scatter and all-gather in n-1 steps around the circle of ranks."""

from collections.abc import Sequence

from stretto.comm.schedule import Action, Op, Program, Schedule, sliced

Turn = tuple[int, Action]
"""Once around: the chunk that a rank sends first, and what it does with those it receives."""


def ring(size: int, parts: int = 1) -> Schedule:
    """Sum around a ring, each rank sending 2(n-1) messages of 1/n of the tensor.

    2(n-1) alpha + 2 (n-1)/n N beta: bandwidth-optimal, latency linear in n; for large tensors.
    Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002.

    The first half is `ring_reduce_scatter`, the second `ring_all_gather`. Every chunk is summed by
    one owner and copied by the others, so all ranks end with the same bits.
    """

    def program(rank: int) -> Program:
        return _around(rank, size, [(rank - 1, Action.ADD), (rank, Action.COPY)])

    return _sliced(Schedule("ring", size, size, program, period=1), parts)


def ring_reduce_scatter(size: int, parts: int = 1) -> Schedule:
    """Leave rank r with the sum of chunk r: (n-1) alpha + (n-1)/n N beta."""

    def program(rank: int) -> Program:
        return _around(rank, size, [(rank - 1, Action.ADD)])

    return _sliced(Schedule("ring", size, size, program, period=1), parts)


def ring_all_gather(size: int, parts: int = 1, informed: int | None = None) -> Schedule:
    """Give everybody the chunk r of every rank r: (n-1) alpha + (n-1)/n N beta.

    A rank that is ``informed`` has every chunk already and is sent none.
    """

    def program(rank: int) -> Program:
        return _around(rank, size, [(rank, Action.COPY)], informed)

    period = 1 if informed is None else None
    return _sliced(Schedule("ring", size, size, program, period=period), parts)


def _around(rank: int, n: int, turns: Sequence[Turn], informed: int | None = None) -> Program:
    """Return the program of ``turns`` around the ring, each of n-1 steps.

    In a step a rank passes on the chunk that it received in the step before, and receives the one
    before that: with each step chunks go down by one.
    """
    above, below = (rank + 1) % n, (rank - 1) % n
    sends, receives = above != informed, rank != informed
    ops: list[Op] = []
    after: tuple[int, ...] = ()
    for first_leaving, receive in turns:
        for step in range(n - 1):
            leaving, arriving = (first_leaving - step) % n, (first_leaving - step - 1) % n
            first = len(ops)
            if sends:
                ops.append(Op(Action.SEND, above, leaving, leaving + 1, after))
            if receives:
                ops.append(Op(receive, below, arriving, arriving + 1, after))
            after = (first, first + 1) if sends and receives else (first,)
    return tuple(ops)


def _sliced(schedule: Schedule, parts: int) -> Schedule:
    # Two lanes: one slice is added while the other travels; more measured no better.
    return sliced(schedule, parts, width=min(parts, 2))

"""Binomial trees: up to rank 0, down from it, or both.

The tree hangs together by the lowest bit: rank r is told by r without its lowest bit b, and stands
for the ranks r to r + b. The furthest child is served first, so a message crosses between hosts,
which hold neighbouring ranks, early and seldom.
"""

from stretto.comm.algorithms.ring import ring_all_gather
from stretto.comm.schedule import (
    Action,
    Op,
    Placing,
    Program,
    Schedule,
    in_steps,
    one_after_another,
)

UP, DOWN = 0, 1
"""Lanes: one part of the tensor comes down while the next goes up."""
SCATTER, GATHER = 0, 1
"""Lanes: one part is handed out while the one before it goes around the ring."""


def binomial(size: int) -> Schedule:
    """Sum up a binomial tree and send the sum down it: 2 L (alpha + N beta), L = ceil(log2 n).

    Thakur, Rabenseifner and Gropp, 2005, doi:10.1177/1094342005051521.
    """

    def program(rank: int) -> Program:
        above = rank - _span(rank, size)
        told = _children(rank, size)
        steps = [Op(Action.ADD, child, 0, 1, lane=UP) for child in reversed(told)]
        if rank:
            steps.append(Op(Action.SEND, above, 0, 1, lane=UP))
            steps.append(Op(Action.COPY, above, 0, 1, lane=DOWN))
        steps += [Op(Action.SEND, child, 0, 1, lane=DOWN) for child in told]
        return in_steps([op] for op in steps)

    return Schedule("binomial", size, num_chunks=1, program=program)


def broadcast(size: int) -> Schedule:
    """Give everybody what rank 0 holds: L (alpha + N beta), L = ceil(log2 n)."""

    def program(rank: int) -> Program:
        steps = [Op(Action.COPY, rank - _span(rank, size), 0, 1)] if rank else []
        steps += [Op(Action.SEND, child, 0, 1) for child in _children(rank, size)]
        return in_steps([op] for op in steps)

    return Schedule("broadcast", size, num_chunks=1, program=program)


def scatter_gather(size: int) -> Schedule:
    """Give everybody what rank 0 holds, for large tensors: hand out 1/n each, then share by ring.

    (L + n-1) alpha + 2 (n-1)/n N beta, against L N beta down a tree.
    Thakur, Rabenseifner and Gropp, 2005, doi:10.1177/1094342005051521.
    """
    gather = ring_all_gather(size, informed=0)

    def program(rank: int) -> Program:
        stop = min(rank + _span(rank, size), size)
        steps = [Op(Action.COPY, rank - _span(rank, size), rank, stop)] if rank else []
        for child in _children(rank, size):
            steps.append(Op(Action.SEND, child, child, stop))
            stop = child
        return one_after_another(
            in_steps([op] for op in steps),
            Placing(range(size), lane=GATHER).program(gather, rank),
        )

    return Schedule("scatter-gather", size, num_chunks=size, program=program)


def _span(rank: int, size: int) -> int:
    """Return how many ranks ``rank`` stands for, were the tree full: its lowest bit."""
    return rank & -rank if rank else 1 << (size - 1).bit_length()


def _children(rank: int, size: int) -> list[int]:
    """Return whom ``rank`` tells, the furthest first."""
    bits = range(_span(rank, size).bit_length() - 2, -1, -1)
    return [rank + (1 << bit) for bit in bits if rank + (1 << bit) < size]

"""Recursive halving and its mirror: reduce-scatter and all-gather in ceil(log2 n) steps.

Ranks lo to hi, who hold the chunks lo to hi, split in the middle: each gives its partner in the
other half the chunks of that half. Where the lower half has one rank more, that rank's partner is
the last of the upper half, which then has two. So rank r ends with chunk r, for any n.
"""

from collections.abc import Sequence

from stretto.comm.schedule import Action, Op, Program, Schedule, in_steps

Split = tuple[int, int, int]
"""(lo, middle, hi)"""


def halving_reduce_scatter(size: int) -> Schedule:
    """Leave rank r with the sum of chunk r: L alpha + (n-1)/n N beta, L = ceil(log2 n).

    Thakur, Rabenseifner and Gropp, 2005, doi:10.1177/1094342005051521. Where n is no power of two
    some ranks receive twice in a step. Partners are far first, when messages are large: a ring, or
    hosts first, is kinder to slow links.
    """

    def program(rank: int) -> Program:
        return in_steps(_scatter(rank, split) for split in _splits(rank, size))

    return Schedule("halving", size, size, program)


def doubling_all_gather(size: int) -> Schedule:
    """Give everybody the chunk r of every rank r: L alpha + (n-1)/n N beta, L = ceil(log2 n)."""

    def program(rank: int) -> Program:
        return in_steps(_gather(rank, split) for split in reversed(_splits(rank, size)))

    return Schedule("doubling", size, size, program)


def _splits(rank: int, size: int) -> list[Split]:
    """Return the splits that ``rank`` takes part in, the widest first."""
    lo, hi, splits = 0, size, list[Split]()
    while hi - lo > 1:
        middle = (lo + hi + 1) // 2
        splits.append((lo, middle, hi))
        lo, hi = (lo, middle) if rank < middle else (middle, hi)
    return splits


def _scatter(rank: int, split: Split) -> Sequence[Op]:
    lo, middle, hi = split
    ours, theirs = ((lo, middle), (middle, hi)) if rank < middle else ((middle, hi), (lo, middle))
    partner, odd = _partners(rank, split)
    if rank < middle and odd is not None:
        return [Op(Action.SEND, odd, *theirs)]
    ops = [Op(Action.SEND, partner, *theirs), Op(Action.ADD, partner, *ours)]
    return ops if odd is None else [*ops, Op(Action.ADD, odd, *ours)]


def _gather(rank: int, split: Split) -> Sequence[Op]:
    lo, middle, hi = split
    ours, theirs = ((lo, middle), (middle, hi)) if rank < middle else ((middle, hi), (lo, middle))
    partner, odd = _partners(rank, split)
    if rank < middle and odd is not None:
        return [Op(Action.COPY, odd, *theirs)]
    ops = [Op(Action.SEND, partner, *ours), Op(Action.COPY, partner, *theirs)]
    return ops if odd is None else [*ops, Op(Action.SEND, odd, *ours)]


def _partners(rank: int, split: Split) -> tuple[int, int | None]:
    """Return the partner in the other half, and, for two ranks of an odd number, the odd one out.

    The last of the lower half, which is left over, and the last of the upper one have each other.
    """
    lo, middle, hi = split
    uneven = (hi - lo) % 2 == 1
    if rank < middle:
        return rank - lo + middle, hi - 1 if uneven and rank == middle - 1 else None
    return rank - middle + lo, middle - 1 if uneven and rank == hi - 1 else None

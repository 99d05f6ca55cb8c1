"""Binomial-tree broadcast."""

from stretto.comm.schedule import Action, Op, Program, Schedule


def broadcast(size: int) -> Schedule:
    """Give everybody what rank 0 holds, in ceil(log2 n) rounds.

    Rank r hears from the rank that lacks r's highest bit, then tells every r + 2^k above it.
    """

    def program(rank: int) -> Program:
        ops: list[Op] = []
        bit = 1
        if rank:
            bit = 1 << (rank.bit_length() - 1)
            ops.append(Op(Action.COPY, rank - bit, 0, 1))
            bit <<= 1
        while rank + bit < size:
            ops.append(Op(Action.SEND, rank + bit, 0, 1, after=(0,) if rank else ()))
            bit <<= 1
        return tuple(ops)

    return Schedule("broadcast", size, num_chunks=1, program=program)

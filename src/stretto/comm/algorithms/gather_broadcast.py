"""Everybody sends to rank 0, which sums and sends to everybody: the baseline of all others."""

from stretto.comm.schedule import Action, Op, Program, Schedule, in_steps

UP, DOWN = 0, 1
"""Lanes: while rank 0 sends the sum of one part, it already receives the next."""


def gather_broadcast(size: int) -> Schedule:
    """Sum at rank 0, in the order of ranks: 2(n-1) (alpha + N beta), all of it at one link.

    One message at a time, so that rank 0 needs room for one tensor besides its own, not for n-1.
    """

    def program(rank: int) -> Program:
        if rank:
            return in_steps(
                [[Op(Action.SEND, 0, 0, 1, lane=UP)], [Op(Action.COPY, 0, 0, 1, lane=DOWN)]]
            )
        others = range(1, size)
        gathered = [[Op(Action.ADD, peer, 0, 1, lane=UP)] for peer in others]
        return in_steps(gathered + [[Op(Action.SEND, peer, 0, 1, lane=DOWN)] for peer in others])

    return Schedule("gather-broadcast", size, num_chunks=1, program=program)

"""Ring all-reduce."""

from stretto.comm.schedule import Action, Op, Program, Schedule


def ring(size: int) -> Schedule:
    """Sum around a ring, each rank sending 2(n-1) messages of 1/n of the tensor.

    Bandwidth-optimal, latency linear in n: the choice for large tensors.
    Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002.

    In round k of the first half, rank r passes on chunk r-k and adds what arrives; after n-1
    rounds it holds the whole sum of chunk r+1, which the second half carries once around. Every
    chunk is summed by one owner and copied by the others, so all ranks end with the same bits.
    """
    n = size

    def program(rank: int) -> Program:
        ops: list[Op] = []
        for k in range(2 * (n - 1)):
            leaving, arriving = (rank - k) % n, (rank - k - 1) % n
            # What leaves now is what arrived in the round before.
            after = (len(ops) - 1,) if k else ()
            ops.append(Op(Action.SEND, (rank + 1) % n, leaving, leaving + 1, after))
            receive = Action.ADD if k < n - 1 else Action.COPY
            ops.append(Op(receive, (rank - 1) % n, arriving, arriving + 1))
        return tuple(ops)

    return Schedule("ring", n, num_chunks=n, program=program)

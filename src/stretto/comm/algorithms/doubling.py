"""Recursive doubling: everybody exchanges everything with ranks ever further away."""

from collections.abc import Iterator, Sequence

from stretto.comm.algorithms.fold import Members, Message, folded, taken_in_turn
from stretto.comm.schedule import Action, Program, Schedule


def doubling(size: int) -> Schedule:
    """Sum in log2 n exchanges of the whole tensor: L (alpha + N beta), for small tensors.

    Thakur, Rabenseifner and Gropp, 2005, doi:10.1177/1094342005051521. Both ends of an exchange
    add the same two numbers, so partners have the same bits after it. Two more messages where n
    is no power of two.
    """

    def program(rank: int) -> Program:
        return taken_in_turn(folded(rank, size, 1, _exchanges))

    return Schedule("doubling", size, num_chunks=1, program=program)


def _exchanges(place: int, members: Members) -> Iterator[Sequence[Message]]:
    distance = 1
    while distance < members.count:
        peer = members[place ^ distance]
        yield (Action.SEND, peer, 0, 1), (Action.ADD, peer, 0, 1)
        distance *= 2

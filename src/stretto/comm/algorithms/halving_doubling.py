"""Halving and doubling: exchange half of what is left with ranks ever further, then retrace."""

from collections.abc import Sequence

from stretto.comm.algorithms.fold import Members, Message, folded, taken_in_turn
from stretto.comm.schedule import Action, Program, Schedule

Halving = tuple[int, tuple[int, int], tuple[int, int]]
"""How far away the partner is, the chunks that are kept, and those that it takes over."""
Exchange = tuple[Message, Message]
"""What is sent and what is received in one step."""


def halving_doubling(size: int) -> Schedule:
    """Sum in 2 log2 n exchanges, of which the first and last carry half of the tensor.

    2 L alpha + 2 (n-1)/n N beta: as few bytes as a ring in logarithmically many steps.
    Rabenseifner, 2004, doi:10.1007/978-3-540-24685-5_1. Where n is no power of two, `folded`: two
    more messages, of the whole tensor; `binary_blocks` avoids these.

    Partners are near first, when messages are large, so that these stay inside hosts. Each chunk
    is summed by one rank and copied by the others: the same bits everywhere.
    """
    num_chunks = 1 << (size.bit_length() - 1)

    def program(rank: int) -> Program:
        return taken_in_turn(folded(rank, size, num_chunks, _there_and_back))

    return Schedule("halving-doubling", size, num_chunks, program)


def halvings(place: int, count: int, num_chunks: int) -> list[Halving]:
    """Return what ``place`` of ``count`` keeps and gives away, one halving after another.

    Bit k of the place says which half is kept in halving k, so whoever agrees with it in the
    lowest bits has kept the same chunks so far.
    """
    start, stop, found, distance = 0, num_chunks, list[Halving](), 1
    while distance < count:
        middle = (start + stop) // 2
        if place & distance:
            found.append((distance, (middle, stop), (start, middle)))
            start = middle
        else:
            found.append((distance, (start, middle), (middle, stop)))
            stop = middle
        distance *= 2
    return found


def _there_and_back(place: int, members: Members) -> list[Exchange]:
    cuts = halvings(place, members.count, members.count)
    peers = [members[place ^ distance] for distance, _, _ in cuts]
    return scattering(cuts, peers) + gathering(cuts, peers)


def scattering(cuts: Sequence[Halving], peers: Sequence[int]) -> list[Exchange]:
    """Return the steps that leave the last of ``cuts`` summed over all who take part."""
    send, add = Action.SEND, Action.ADD
    return [
        ((send, peer, *given), (add, peer, *kept))
        for (_, kept, given), peer in zip(cuts, peers, strict=True)
    ]


def gathering(cuts: Sequence[Halving], peers: Sequence[int]) -> list[Exchange]:
    """Return the steps that retrace ``cuts``, so that all have what each has summed."""
    send, copy = Action.SEND, Action.COPY
    return [
        ((send, peer, *kept), (copy, peer, *given))
        for (_, kept, given), peer in zip(reversed(cuts), reversed(peers), strict=True)
    ]

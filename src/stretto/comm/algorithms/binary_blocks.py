"""Halving and doubling inside blocks of powers of two, for any number of ranks."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from stretto.comm.algorithms.fold import Message, taken_in_turn
from stretto.comm.algorithms.halving_doubling import gathering, halvings, scattering
from stretto.comm.schedule import Action, Program, Schedule


def binary_blocks(size: int) -> Schedule:
    """Halve inside each block, add up from block to larger block, and all the way back.

    `halving_doubling` where n is a power of two. Otherwise n is a sum of powers, each a block, and
    2 (L + 1) alpha + about 2 N beta: every block has added the smaller ones by the time that the
    next larger one has halved. Good for few large blocks (12 = 8 + 4), worst for 2^m + 1, where
    one rank hands out its whole tensor in 2^m messages.
    Rabenseifner, 2004, doi:10.1007/978-3-540-24685-5_1.
    """
    sizes = [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    blocks = [
        range(stop - count, stop) for stop, count in zip(accumulate(sizes), sizes, strict=True)
    ]

    def program(rank: int) -> Program:
        index = next(index for index, block in enumerate(blocks) if rank in block)
        larger = blocks[index - 1] if index else range(0)
        smaller = blocks[index + 1] if index + 1 < len(blocks) else range(0)
        return taken_in_turn(_steps(rank, blocks[index], larger, smaller, sizes[0]))

    return Schedule("binary-blocks", size, sizes[0], program)


def _steps(
    rank: int, block: range, larger: range, smaller: range, num_chunks: int
) -> Iterator[Sequence[Message]]:
    """Yield what ``rank`` does in its block, and towards its neighbours, which may be empty.

    Its peers in the larger block are those that agree with its place in all the bits it has: what
    it kept is what they kept, taken together. One in the smaller block is its peer likewise.
    """
    place = rank - block.start
    cuts = halvings(place, len(block), num_chunks)
    peers = [block[place ^ distance] for distance, _, _ in cuts]
    kept = cuts[-1][1] if cuts else (0, num_chunks)
    below = [smaller[place % len(smaller)]] if smaller else []
    above = [
        (larger[other], *halvings(other, len(larger), num_chunks)[-1][1])
        for other in range(place, len(larger), len(block))
    ]
    yield from scattering(cuts, peers)
    if below:
        yield [(Action.ADD, peer, *kept) for peer in below]
    if above:
        yield [(Action.SEND, *theirs) for theirs in above]
        yield [(Action.COPY, *theirs) for theirs in above]
    if below:
        yield [(Action.SEND, peer, *kept) for peer in below]
    yield from gathering(cuts, peers)

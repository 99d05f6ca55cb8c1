"""Recursive halving and doubling: collectives in about log2 n steps.

`doubling` and `halving_doubling` are all-reduces for a power of two of ranks. Other ranks are
folded onto these (`fold_to_power_of_two`). `binary_blocks` needs no folding, and neither do
`halving_reduce_scatter` and `doubling_all_gather`.

Costs are written with n ranks, L = log2 n, N bytes, alpha seconds a message, beta seconds a byte.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from stretto.collectives.schedule import Action, Op, Program, Schedule, chain_steps

PendingOp = tuple[Action, int, int, int]
"""(action, peer, start, stop) of an operation whose ``after`` is not set yet."""
OpSteps = Iterable[Sequence[PendingOp]]


def chain_op_steps(steps: OpSteps) -> Program:
    """Return the program in which each step starts when the one before is done, on one lane.

    Like `chain_steps`, but every `Op` is created only once. This matters for simulations of ten
    thousand ranks, which spend most of their time on creating operations.
    """
    ops: list[Op] = []
    before: tuple[int, ...] = ()
    first = 0
    for step in steps:
        for action, peer, start, stop in step:
            ops.append(Op(action, peer, start, stop, before))
        last, first = first, len(ops)
        before = (last, last + 1) if first - last == 2 else tuple(range(last, first))
    return tuple(ops)


@dataclass(frozen=True, slots=True)
class PowerOfTwoRanks:
    """The largest power of two of ranks; computed, not listed, since there may be thousands."""

    count: int
    num_paired: int
    """Number of these ranks that also represent a neighbour."""

    def __getitem__(self, position: int) -> int:
        """Return the rank at ``position``."""
        return 2 * position + 1 if position < self.num_paired else position + self.num_paired

    def position(self, rank: int) -> int:
        """Return the position of ``rank``, which must be one of these ranks."""
        return rank // 2 if rank < 2 * self.num_paired else rank - self.num_paired


def fold_to_power_of_two(
    rank: int, size: int, num_chunks: int, core_steps: Callable[[int, PowerOfTwoRanks], OpSteps]
) -> Iterator[Sequence[PendingOp]]:
    """Yield the steps of ``rank`` when an algorithm for a power of two of ranks runs on ``size``.

    Of n = 2^m + r ranks, the first 2r form pairs. The even rank of a pair sends its tensor to the
    odd one, which takes part for both, and receives the result at the end. This costs two more
    messages of the whole tensor.

    Args:
        rank: The rank whose steps are wanted.
        size: Number of ranks.
        num_chunks: Number of chunks of the tensor.
        core_steps: Returns the steps of the algorithm, given a position and the taking-part ranks.
    """
    count = 1 << (size.bit_length() - 1)
    members = PowerOfTwoRanks(count, size - count)
    is_paired = rank < 2 * members.num_paired
    if is_paired and rank % 2 == 0:
        yield ((Action.SEND, rank + 1, 0, num_chunks),)
        yield ((Action.COPY, rank + 1, 0, num_chunks),)
        return
    if is_paired:
        yield ((Action.ADD, rank - 1, 0, num_chunks),)
    yield from core_steps(members.position(rank), members)
    if is_paired:
        yield ((Action.SEND, rank - 1, 0, num_chunks),)


def doubling(size: int) -> Schedule:
    """All-reduce by recursive doubling: L exchanges of the whole tensor, for small tensors.

    Cost: L (alpha + N beta). In step i, ranks at distance 2^i exchange and add. Both ends of an
    exchange add the same two numbers, so both have the same bits. If n is no power of two, two more
    messages are needed. Thakur, Rabenseifner and Gropp, 2005, doi:10.1177/1094342005051521.
    """

    def program(rank: int) -> Program:
        return chain_op_steps(fold_to_power_of_two(rank, size, 1, _doubling_steps))

    return Schedule("doubling", size, num_chunks=1, program=program)


def _doubling_steps(position: int, members: PowerOfTwoRanks) -> Iterator[Sequence[PendingOp]]:
    distance = 1
    while distance < members.count:
        peer = members[position ^ distance]
        yield (Action.SEND, peer, 0, 1), (Action.ADD, peer, 0, 1)
        distance *= 2


# --- reduce-scatter and all-gather for any number of ranks ---

RankRangeSplit = tuple[int, int, int]
"""(lo, middle, hi): the ranks lo to hi - 1 split into two halves at ``middle``."""


def halving_reduce_scatter(size: int) -> Schedule:
    """Reduce-scatter by recursive halving: rank r ends with the sum of chunk r.

    Cost: L alpha + (n-1)/n N beta, L = ceil(log2 n). Thakur, Rabenseifner and Gropp, 2005,
    doi:10.1177/1094342005051521.

    The ranks lo to hi, with the chunks lo to hi, split in the middle. Each rank sends its partner
    in the other half the chunks of that half. If the lower half has one rank more, its last rank
    has the last rank of the upper half as partner, which then receives twice.

    The first and largest messages go to the most distant ranks. Across slow links, a ring or a
    hierarchical reduce-scatter is faster.
    """

    def program(rank: int) -> Program:
        return chain_steps(_reduce_scatter_step(rank, split) for split in _range_splits(rank, size))

    return Schedule("halving", size, size, program)


def doubling_all_gather(size: int) -> Schedule:
    """All-gather by recursive doubling: every rank ends with the chunk r of every rank r.

    Cost: L alpha + (n-1)/n N beta, L = ceil(log2 n). It is `halving_reduce_scatter` in reverse.
    """

    def program(rank: int) -> Program:
        return chain_steps(
            _all_gather_step(rank, split) for split in reversed(_range_splits(rank, size))
        )

    return Schedule("doubling", size, size, program)


def _range_splits(rank: int, size: int) -> list[RankRangeSplit]:
    """Return the splits of ranges that contain ``rank``, the widest first."""
    lo, hi, splits = 0, size, list[RankRangeSplit]()
    while hi - lo > 1:
        middle = (lo + hi + 1) // 2
        splits.append((lo, middle, hi))
        lo, hi = (lo, middle) if rank < middle else (middle, hi)
    return splits


def _reduce_scatter_step(rank: int, split: RankRangeSplit) -> Sequence[Op]:
    lo, middle, hi = split
    own_chunks, peer_chunks = (
        ((lo, middle), (middle, hi)) if rank < middle else ((middle, hi), (lo, middle))
    )
    partner, extra_partner = _partners(rank, split)
    if rank < middle and extra_partner is not None:
        return [Op(Action.SEND, extra_partner, *peer_chunks)]
    ops = [Op(Action.SEND, partner, *peer_chunks), Op(Action.ADD, partner, *own_chunks)]
    return ops if extra_partner is None else [*ops, Op(Action.ADD, extra_partner, *own_chunks)]


def _all_gather_step(rank: int, split: RankRangeSplit) -> Sequence[Op]:
    lo, middle, hi = split
    own_chunks, peer_chunks = (
        ((lo, middle), (middle, hi)) if rank < middle else ((middle, hi), (lo, middle))
    )
    partner, extra_partner = _partners(rank, split)
    if rank < middle and extra_partner is not None:
        return [Op(Action.COPY, extra_partner, *peer_chunks)]
    ops = [Op(Action.SEND, partner, *own_chunks), Op(Action.COPY, partner, *peer_chunks)]
    return ops if extra_partner is None else [*ops, Op(Action.SEND, extra_partner, *own_chunks)]


def _partners(rank: int, split: RankRangeSplit) -> tuple[int, int | None]:
    """Return the partner of ``rank`` in the other half, and a second partner or None.

    If the lower half has one rank more, its last rank is left over. That rank and the last rank of
    the upper half then have each other as second partner.
    """
    lo, middle, hi = split
    is_uneven = (hi - lo) % 2 == 1
    if rank < middle:
        return rank - lo + middle, hi - 1 if is_uneven and rank == middle - 1 else None
    return rank - middle + lo, middle - 1 if is_uneven and rank == hi - 1 else None


# --- all-reduce: halving, then doubling ---

HalvingStep = tuple[int, tuple[int, int], tuple[int, int]]
"""(distance to the partner, chunks that the rank keeps, chunks that the partner keeps)"""
ExchangeStep = tuple[PendingOp, PendingOp]
"""(send, receive) of one step."""


def halving_doubling(size: int) -> Schedule:
    """All-reduce by a reduce-scatter by halving and an all-gather by doubling.

    Cost: 2 L alpha + 2 (n-1)/n N beta, as few bytes as a ring in logarithmically many steps. The
    first and the last message have half of the tensor. Rabenseifner, 2004,
    doi:10.1007/978-3-540-24685-5_1. If n is no power of two, `fold_to_power_of_two` adds two
    messages of the whole tensor, which `binary_blocks` avoids.

    The first and largest messages go to the nearest ranks, so they stay inside hosts. Each chunk is
    summed by one rank and copied by the others, so all ranks have the same bits.
    """
    num_chunks = 1 << (size.bit_length() - 1)

    def program(rank: int) -> Program:
        return chain_op_steps(
            fold_to_power_of_two(rank, size, num_chunks, _reduce_scatter_then_all_gather)
        )

    return Schedule("halving-doubling", size, num_chunks, program)


def halving_steps(position: int, count: int, num_chunks: int) -> list[HalvingStep]:
    """Return the halving steps of ``position`` among ``count`` ranks.

    Bit k of the position says which half is kept in step k. So all positions with the same lowest k
    bits keep the same chunks in the first k steps.
    """
    start, stop, found, distance = 0, num_chunks, list[HalvingStep](), 1
    while distance < count:
        middle = (start + stop) // 2
        if position & distance:
            found.append((distance, (middle, stop), (start, middle)))
            start = middle
        else:
            found.append((distance, (start, middle), (middle, stop)))
            stop = middle
        distance *= 2
    return found


def _reduce_scatter_then_all_gather(position: int, members: PowerOfTwoRanks) -> list[ExchangeStep]:
    halvings = halving_steps(position, members.count, members.count)
    peers = [members[position ^ distance] for distance, _, _ in halvings]
    return reduce_scatter_steps(halvings, peers) + all_gather_steps(halvings, peers)


def reduce_scatter_steps(
    halvings: Sequence[HalvingStep], peers: Sequence[int]
) -> list[ExchangeStep]:
    """Return the steps after which the chunks kept in the last of ``halvings`` are summed."""
    send, add = Action.SEND, Action.ADD
    return [
        ((send, peer, *given), (add, peer, *kept))
        for (_, kept, given), peer in zip(halvings, peers, strict=True)
    ]


def all_gather_steps(halvings: Sequence[HalvingStep], peers: Sequence[int]) -> list[ExchangeStep]:
    """Return the steps that reverse ``halvings``, so that all ranks have all sums."""
    send, copy = Action.SEND, Action.COPY
    return [
        ((send, peer, *kept), (copy, peer, *given))
        for (_, kept, given), peer in zip(reversed(halvings), reversed(peers), strict=True)
    ]


def binary_blocks(size: int) -> Schedule:
    """All-reduce by halving and doubling inside blocks, whose sizes are powers of two.

    n is written as a sum of powers of two, and each is the size of a block of ranks. Each block
    reduce-scatters by halving, adds the sums of the smaller block, and sends the result to the next
    larger one. Then everything is reversed. For a power of two this is `halving_doubling`.

    Cost: 2 (L + 1) alpha + about 2 N beta, since a block has added the smaller ones by the time the
    next larger one has halved. Few large blocks are good (12 = 8 + 4). The worst case is 2^m + 1,
    where one rank sends its whole tensor in 2^m messages.
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
        return chain_op_steps(_block_steps(rank, blocks[index], larger, smaller, sizes[0]))

    return Schedule("binary-blocks", size, sizes[0], program)


def _block_steps(
    rank: int, block: range, larger: range, smaller: range, num_chunks: int
) -> Iterator[Sequence[PendingOp]]:
    """Yield the steps of ``rank`` in its block and with neighbouring blocks, which may be empty.

    Its peers in the larger block are the positions with the same lowest bits as its own position.
    Together they keep exactly the chunks that this rank keeps. Its peer in the smaller block is
    found by the same rule.
    """
    position = rank - block.start
    halvings = halving_steps(position, len(block), num_chunks)
    peers = [block[position ^ distance] for distance, _, _ in halvings]
    kept = halvings[-1][1] if halvings else (0, num_chunks)
    smaller_block_peers = [smaller[position % len(smaller)]] if smaller else []
    larger_block_chunks = [
        (larger[other], *halving_steps(other, len(larger), num_chunks)[-1][1])
        for other in range(position, len(larger), len(block))
    ]
    yield from reduce_scatter_steps(halvings, peers)
    if smaller_block_peers:
        yield [(Action.ADD, peer, *kept) for peer in smaller_block_peers]
    if larger_block_chunks:
        yield [(Action.SEND, *peer_chunks) for peer_chunks in larger_block_chunks]
        yield [(Action.COPY, *peer_chunks) for peer_chunks in larger_block_chunks]
    if smaller_block_peers:
        yield [(Action.SEND, peer, *kept) for peer in smaller_block_peers]
    yield from all_gather_steps(halvings, peers)

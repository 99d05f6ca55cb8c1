"""Star and tree algorithms: reductions to rank 0 and broadcasts from it.

In the binomial tree, the parent of rank r is r without its lowest set bit b, and the subtree of r
has the ranks r to r + b - 1. The most distant child is served first. Neighbouring ranks share a
host, so messages between hosts are few and early.

Costs are written with n ranks, N bytes, alpha seconds a message and beta seconds a byte.
"""

from collections.abc import Callable

from stretto.collectives.algorithms.ring import ring_all_gather
from stretto.collectives.schedule import (
    Action,
    Op,
    Program,
    Schedule,
    SubgroupMapping,
    chain_programs,
    chain_steps,
)

REDUCE_LANE, BROADCAST_LANE = 0, 1
"""Lanes: the broadcast of one part overlaps with the reduction of the next. In `double_tree` the
second tree has two more lanes."""
SCATTER_LANE, ALL_GATHER_LANE = 0, 1
"""Lanes: the scatter of one part overlaps with the all-gather of the one before."""


def gather_broadcast(size: int) -> Schedule:
    """All-reduce in which every rank sends to rank 0, which sends the sum back; the baseline.

    Cost: 2(n-1) (alpha + N beta), all at the link of rank 0. Rank 0 adds in rank order, one message
    at a time, so it needs a receive buffer for one tensor, not for n-1.
    """

    def program(rank: int) -> Program:
        if rank:
            return chain_steps(
                [
                    [Op(Action.SEND, 0, 0, 1, lane=REDUCE_LANE)],
                    [Op(Action.COPY, 0, 0, 1, lane=BROADCAST_LANE)],
                ]
            )
        others = range(1, size)
        gathered = [[Op(Action.ADD, peer, 0, 1, lane=REDUCE_LANE)] for peer in others]
        return chain_steps(
            gathered + [[Op(Action.SEND, peer, 0, 1, lane=BROADCAST_LANE)] for peer in others]
        )

    return Schedule("gather-broadcast", size, num_chunks=1, program=program)


def binomial(size: int) -> Schedule:
    """All-reduce by a reduction up a binomial tree and a broadcast down it.

    Cost: 2 L (alpha + N beta), L = ceil(log2 n).
    Thakur, Rabenseifner and Gropp, 2005, doi:10.1177/1094342005051521.
    """

    def program(rank: int) -> Program:
        parent = rank - _subtree_size(rank, size)
        children = _binomial_children(rank, size)
        steps = [Op(Action.ADD, child, 0, 1, lane=REDUCE_LANE) for child in reversed(children)]
        if rank:
            steps.append(Op(Action.SEND, parent, 0, 1, lane=REDUCE_LANE))
            steps.append(Op(Action.COPY, parent, 0, 1, lane=BROADCAST_LANE))
        steps += [Op(Action.SEND, child, 0, 1, lane=BROADCAST_LANE) for child in children]
        return chain_steps([op] for op in steps)

    return Schedule("binomial", size, num_chunks=1, program=program)


def broadcast(size: int) -> Schedule:
    """Broadcast from rank 0 down a binomial tree: L (alpha + N beta), L = ceil(log2 n)."""

    def program(rank: int) -> Program:
        steps = [Op(Action.COPY, rank - _subtree_size(rank, size), 0, 1)] if rank else []
        steps += [Op(Action.SEND, child, 0, 1) for child in _binomial_children(rank, size)]
        return chain_steps([op] for op in steps)

    return Schedule("broadcast", size, num_chunks=1, program=program)


def scatter_gather(size: int) -> Schedule:
    """Broadcast from rank 0 for large tensors: a scatter down a tree, then a ring all-gather.

    Cost: (L + n-1) alpha + 2 (n-1)/n N beta, against L (alpha + N beta) of `broadcast`.
    Thakur, Rabenseifner and Gropp, 2005, doi:10.1177/1094342005051521.
    """
    gather = ring_all_gather(size, complete_rank=0)

    def program(rank: int) -> Program:
        stop = min(rank + _subtree_size(rank, size), size)
        steps = [Op(Action.COPY, rank - _subtree_size(rank, size), rank, stop)] if rank else []
        for child in _binomial_children(rank, size):
            steps.append(Op(Action.SEND, child, child, stop))
            stop = child
        return chain_programs(
            chain_steps([op] for op in steps),
            SubgroupMapping(range(size), lane=ALL_GATHER_LANE).program(gather, rank),
        )

    return Schedule("scatter-gather", size, num_chunks=size, program=program)


def _subtree_size(rank: int, size: int) -> int:
    """Return the size of the subtree of ``rank`` in a full tree: its lowest set bit."""
    return rank & -rank if rank else 1 << (size - 1).bit_length()


def _binomial_children(rank: int, size: int) -> list[int]:
    """Return the children of ``rank``, the most distant first."""
    bits = range(_subtree_size(rank, size).bit_length() - 2, -1, -1)
    return [rank + (1 << bit) for bit in bits if rank + (1 << bit) < size]


def double_tree(size: int) -> Schedule:
    """All-reduce by two binary trees, each of which reduces and broadcasts half of the tensor.

    A rank that relays in one tree is a leaf in the other, so all links are busy. Cost with many
    parts: about 2 L alpha + 2 N beta, L = log2 n, nearly a ring's bandwidth in logarithmic depth.
    Sanders, Speck and Traeff, 2009, doi:10.1016/j.parco.2009.09.001.

    A tree is an in-order binary tree of positions 1 to n, whose leaves are the odd positions. In
    the first tree, rank r has position r + 1. The second tree is its mirror image. For odd n it is
    shifted by one instead, and one rank is a leaf in both trees.
    """

    def rank_in_mirrored_tree(position: int) -> int:
        return size - position if size % 2 == 0 else (position - 2) % size

    def program(rank: int) -> Program:
        first = _tree_program(rank + 1, size, 0, lambda position: position - 1)
        position = size - rank if size % 2 == 0 else (rank + 1) % size + 1
        return _merge_independent(first, _tree_program(position, size, 1, rank_in_mirrored_tree))

    return Schedule("double-tree", size, num_chunks=2, program=program)


def _tree_program(position: int, size: int, tree: int, rank_at: Callable[[int], int]) -> Program:
    """Return the program of ``position`` in a tree: reduce from the children, then broadcast."""
    parent_position = _binary_tree_parent(position, size)
    parent = [] if parent_position is None else [rank_at(parent_position)]
    children = [rank_at(child) for child in _binary_tree_children(position, size)]
    up, down = 2 * tree + REDUCE_LANE, 2 * tree + BROADCAST_LANE
    return chain_steps(
        [
            [Op(Action.ADD, peer, tree, tree + 1, lane=up) for peer in children],
            [Op(Action.SEND, peer, tree, tree + 1, lane=up) for peer in parent],
            [Op(Action.COPY, peer, tree, tree + 1, lane=down) for peer in parent],
            [Op(Action.SEND, peer, tree, tree + 1, lane=down) for peer in children],
        ]
    )


def _binary_tree_children(position: int, size: int) -> list[int]:
    """Return the positions below ``position``, from 1 to ``size``: one on either side, or none.

    The lowest set bit is the height. If the right child of the full tree is beyond ``size``, its
    nearest left descendant that is not replaces it.
    """
    half = (position & -position) // 2
    found = [position - half] if half else []
    while half and position + half > size:
        half //= 2
    return [*found, position + half] if half else found


def _binary_tree_parent(position: int, size: int) -> int | None:
    """Return the position above: the nearest ancestor in the full tree not beyond ``size``."""
    bit = position & -position
    while bit <= size:
        position = position ^ bit | bit << 1
        bit <<= 1
        if position <= size:
            return position
    return None


def _merge_independent(one: Program, other: Program) -> Program:
    """Return both programs as one; neither waits for the other."""
    shift = len(one)
    return one + tuple(
        Op(op.action, op.peer, op.start, op.stop, tuple(i + shift for i in op.after), op.lane)
        for op in other
    )

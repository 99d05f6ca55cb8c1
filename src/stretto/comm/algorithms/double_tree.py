"""Two binary trees at once: whoever relays in one is a leaf in the other, so all links are busy."""

from collections.abc import Callable

from stretto.comm.schedule import Action, Op, Program, Schedule, in_steps

UP, DOWN = 0, 1
"""Lanes of the first tree, the second has two more: parts come down while later ones go up."""


def double_tree(size: int) -> Schedule:
    """Sum up each of two trees one half of the tensor, and send it down again.

    About 2 L alpha + 2 N beta once parts follow each other, L = log2 n: nearly a ring's bandwidth
    in logarithmic depth. Sanders, Speck and Traeff, 2009, doi:10.1016/j.parco.2009.09.001.

    The ranks stand in a tree in order, so that its leaves are the odd places; the other tree is
    the mirror image, or for odd n moved on by one, where one rank is a leaf in both.
    """

    def mirrored(place: int) -> int:
        return size - place if size % 2 == 0 else (place - 2) % size

    def program(rank: int) -> Program:
        first = _through(rank + 1, size, 0, lambda place: place - 1)
        place = size - rank if size % 2 == 0 else (rank + 1) % size + 1
        return _beside(first, _through(place, size, 1, mirrored))

    return Schedule("double-tree", size, num_chunks=2, program=program)


def _through(place: int, size: int, tree: int, rank_at: Callable[[int], int]) -> Program:
    """Return what ``place`` of a tree does with its chunk: all children added, all told."""
    above = _parent(place, size)
    parent = [] if above is None else [rank_at(above)]
    children = [rank_at(child) for child in _children(place, size)]
    up, down = 2 * tree + UP, 2 * tree + DOWN
    return in_steps(
        [
            [Op(Action.ADD, peer, tree, tree + 1, lane=up) for peer in children],
            [Op(Action.SEND, peer, tree, tree + 1, lane=up) for peer in parent],
            [Op(Action.COPY, peer, tree, tree + 1, lane=down) for peer in parent],
            [Op(Action.SEND, peer, tree, tree + 1, lane=down) for peer in children],
        ]
    )


def _children(place: int, size: int) -> list[int]:
    """Return the places below ``place``, of 1 to ``size``: one on either side, or none.

    The lowest bit is the height. Where the full tree's right child would be beyond the end, the
    nearest of its left descendants that is not takes its place.
    """
    half = (place & -place) // 2
    found = [place - half] if half else []
    while half and place + half > size:
        half //= 2
    return [*found, place + half] if half else found


def _parent(place: int, size: int) -> int | None:
    """Return the place above: the nearest ancestor in the full tree that is not beyond the end."""
    bit = place & -place
    while bit <= size:
        place = place ^ bit | bit << 1
        bit <<= 1
        if place <= size:
            return place
    return None


def _beside(one: Program, other: Program) -> Program:
    """Return both programs as one, neither waiting for the other."""
    shift = len(one)
    return one + tuple(
        Op(op.action, op.peer, op.start, op.stop, tuple(i + shift for i in op.after), op.lane)
        for op in other
    )

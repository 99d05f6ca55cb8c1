"""Base-(k+1) graphs: the exact mean after one cycle for any number of ranks, k peers a round.

Takezawa et al., 2023, arXiv:2305.11420, algorithms 2 and 3.

Note: why it is exact. Write n in base k+1; each digit a at place p is a part of a (k+1)^p ranks.
First every part finds its own mean, as a hyper-hypercube. Then part 0 turns to the rest: each
rank of the rest exchanges with one rank in each of the a copies of (k+1)^p ranks that part 0
consists of, with such weights that afterwards the mean of each copy and the mean of the rest are
the mean of all. The copies find theirs as cubes, and nobody else is needed for it; meanwhile part
1 turns to what is left, and so on. The last part ends with equal values: it has nobody to turn to.

Exactness holds from one multiple of the period to the next; the rounds do not commute.
"""

from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

from stretto.topology.hypercube import check_k, cube_edges, factors
from stretto.topology.mixing import Edge, Peers, Topology, exchange, shifted


def base_graph(k: int = 1) -> Topology:
    """Return the Base-(k+1) graph: of two ways to cut n up, the one with the shorter cycle.

    n = p q, where q has no prime factor of at most k+1: p blocks of q ranks run the simple graph
    side by side, then ranks at one place of their blocks run a hyper-hypercube. Or simple as it is.
    """
    check_k(k)
    return Topology("base", partial(_mixing, k), partial(_period, k))


def simple_base_graph(k: int = 1) -> Topology:
    """Return the Simple Base-(k+1) graph: a hyper-hypercube where n is one, else parts in turn."""
    check_k(k)
    return Topology("simple-base", partial(_simple_mixing, k), partial(_simple_period, k))


class _Part(NamedTuple):
    """Ranks of one digit of n: ``copies`` cubes of ``width`` = (k+1)^``digits`` ranks."""

    first: int
    copies: int
    width: int
    digits: int

    @property
    def size(self) -> int:
        return self.copies * self.width


@lru_cache(maxsize=256)
def _parts(size: int, base: int) -> tuple[_Part, ...]:
    """Return the parts of ``size`` ranks, the largest first."""
    sizes, rest = list[tuple[int, int, int]](), size
    for digits in range(size.bit_length(), -1, -1):
        copies, rest = divmod(rest, base**digits)
        if copies:
            sizes.append((copies, base**digits, digits))
    firsts = accumulate((copies * width for copies, width, _ in sizes), initial=0)
    return tuple(_Part(first, *each) for first, each in zip(firsts, sizes, strict=False))


@lru_cache(maxsize=1024)
def _blocks(size: int, k: int) -> int:
    """Return p, how many blocks run the simple graph side by side; 1 where that is no shorter."""
    blocks = size
    for factor in range(k + 2, size + 1):
        while blocks % factor == 0 and factors(factor, k + 1) is None:
            blocks //= factor
    cube = factors(blocks, k + 1)
    assert cube is not None, "what is left has small factors only"
    length = _simple_period(k, size // blocks) + len(cube)
    return blocks if length < _simple_period(k, size) else 1


def _period(k: int, size: int) -> int:
    blocks = _blocks(size, k)
    return _simple_period(k, size // blocks) + len(factors(blocks, k + 1) or ())


def _mixing(k: int, rank: int, size: int, step: int, segment: int) -> Peers:
    blocks = _blocks(size, k)
    width = size // blocks
    block, place = divmod(rank, width)
    turn, simple_rounds = step % _period(k, size), _simple_period(k, width)
    if turn < simple_rounds:
        return exchange(shifted(_simple_edges(k, place, width, turn), block * width))
    across = cube_edges(block, factors(blocks, k + 1) or (), turn - simple_rounds)
    return exchange(shifted(across, place, stride=width))


def _simple_period(k: int, size: int) -> int:
    cube = factors(size, k + 1)
    if cube is not None:
        return max(1, len(cube))
    largest = _parts(size, k + 1)[0]
    return len(_radices(largest, k)) + 1 + largest.digits


def _simple_mixing(k: int, rank: int, size: int, step: int, segment: int) -> Peers:
    return exchange(_simple_edges(k, rank, size, step % _simple_period(k, size)))


def _simple_edges(k: int, place: int, size: int, turn: int) -> tuple[Edge, ...]:
    """Return whom ``place`` exchanges with in round ``turn`` of a cycle."""
    cube = factors(size, k + 1)
    if cube is not None:
        return cube_edges(place, cube, turn)
    parts = _parts(size, k + 1)
    mine = next(i for i, part in enumerate(parts) if place < part.first + part.size)
    turning = turn - len(_radices(parts[0], k))  # the part that turns to the rest
    if turning < 0 or mine == len(parts) - 1 <= turning:
        return _in_part(place, parts[mine], k, turn)
    if turning < mine:
        return _with_earlier_part(place, parts[turning], size)
    if turning == mine:
        return _with_the_rest(place, parts[mine], size, k)
    return _in_copy(place, parts[mine], k, turning - mine - 1)


def _radices(part: _Part, k: int) -> tuple[int, ...]:
    return (k + 1,) * part.digits + ((part.copies,) if part.copies > 1 else ())


def _in_part(place: int, part: _Part, k: int, turn: int) -> tuple[Edge, ...]:
    """Average over the whole part; one that is done early goes around again, which is harmless."""
    return shifted(cube_edges(place - part.first, _radices(part, k), turn), part.first)


def _in_copy(place: int, part: _Part, k: int, turn: int) -> tuple[Edge, ...]:
    first = place - (place - part.first) % part.width
    return shifted(cube_edges(place - first, (k + 1,) * part.digits, turn), first)


def _with_earlier_part(place: int, part: _Part, size: int) -> tuple[Edge, ...]:
    """Return the edges of a rank of the rest: one to the same place in every copy of ``part``."""
    weight = part.width / (size - part.first)
    index = place - (part.first + part.size)
    return tuple(
        Edge(part.first + copy * part.width + index, weight) for copy in range(part.copies)
    )


def _with_the_rest(place: int, part: _Part, size: int, k: int) -> tuple[Edge, ...]:
    """Return the edge to the rest of a rank in the part that turns to it.

    Ranks for whom there is nobody in the rest average among themselves, k+1 together: they have
    the same value, but for what was learned since the cycle began.
    """
    rest = part.first + part.size
    copy, index = divmod(place - part.first, part.width)
    matched = size - rest
    if index < matched:
        return (Edge(rest + index, part.width / (size - part.first)),)
    alone = part.width - matched
    seat = copy * alone + index - matched
    start = seat - seat % (k + 1)
    stop = min(start + k + 1, alone * part.copies)
    return tuple(
        Edge(part.first + other // alone * part.width + matched + other % alone, 1 / (stop - start))
        for other in range(start, stop)
        if other != seat
    )

"""Hypercubes and Base-(k+1) graphs: topologies that reach the exact mean after one period.

Hypercubes write a rank as digits of a number and average along one digit in each round. After the
rounds of all digits every rank has the exact mean. Digits are binary in the hypercube and of mixed
radix in the hyper-hypercube.

Base-(k+1) graphs reach the exact mean for any number of ranks, with at most k peers in a round:
Takezawa et al., 2023, arXiv:2305.11420, algorithms 2 and 3.

Note: why Base-(k+1) graphs are exact. Write n in base k+1. Each digit a at place p gives a part of
a (k+1)^p ranks, that is a copies of (k+1)^p ranks.

1. Every part averages within itself, as a hyper-hypercube.
2. Part 0 exchanges with the rest: each rank of the rest exchanges with one rank in each copy of
   part 0. The weights are such that afterwards the mean of each copy, and the mean of the rest,
   equal the mean of all ranks.
3. Each copy of part 0 averages within itself as a hypercube. Meanwhile part 1 exchanges with the
   remaining parts in the same way, and so on. The last part already has equal values then.

The mean is exact only over a period that begins at a multiple of the period, because the rounds do
not commute.
"""

from functools import lru_cache, partial
from itertools import accumulate, count
from typing import NamedTuple

from stretto.errors import ConfigError
from stretto.topology.round_peers import Edge, RoundPeers, Topology, shift_edges, symmetric_peers

# --- Hypercubes ---


def hypercube() -> Topology:
    """Return the hypercube: in round t a rank exchanges with the rank that differs in bit t only.

    It has one peer in a round and reaches the mean after any log2 n consecutive rounds. The number
    of ranks must be a power of two.
    """
    return Topology(
        "hypercube",
        partial(_hypercube_peers, 1),
        partial(_hypercube_period, 1),
        _hypercube_size_error,
    )


def hyper_hypercube(k: int = 1) -> Topology:
    """Return the mixed-radix hypercube: n as a product of the fewest factors up to k+1.

    It has a round for each factor, with at most k peers. Numbers of ranks with a prime factor above
    k+1 are refused. Takezawa et al., 2023, arXiv:2305.11420, algorithm 1.
    """
    check_max_peers(k)
    return Topology(
        "hyper-hypercube",
        partial(_hypercube_peers, k),
        partial(_hypercube_period, k),
        partial(_hyper_hypercube_size_error, k),
    )


def check_max_peers(k: int) -> None:
    """Raise ConfigError unless ``k``, the maximum number of peers in a round, is at least 1."""
    if k < 1:
        raise ConfigError(f"k must be at least 1 (the peers of a rank in one round), got {k}")


@lru_cache(maxsize=4096)
def fewest_factors(size: int, max_factor: int) -> tuple[int, ...] | None:
    """Return the fewest factors up to ``max_factor`` with product ``size``, or None."""
    if size == 1:
        return ()
    found = None
    for first in range(min(max_factor, size), 1, -1):
        rest = fewest_factors(size // first, max_factor) if size % first == 0 else None
        if rest is not None and (found is None or len(rest) + 1 < len(found)):
            found = (*rest, first)
    return found


def hypercube_edges(position: int, radices: tuple[int, ...], round_index: int) -> tuple[Edge, ...]:
    """Return the edges of ``position`` in a round: to all positions that differ in one digit only.

    The digit is ``round_index`` modulo the number of digits. Without digits there is one position,
    and no edge.
    """
    if not radices:
        return ()
    index = round_index % len(radices)
    stride = 1
    for radix in radices[:index]:
        stride *= radix
    radix = radices[index]
    digit = position // stride % radix
    return tuple(
        Edge(position + (other - digit) * stride, 1.0 / radix)
        for other in range(radix)
        if other != digit
    )


def _hypercube_peers(k: int, rank: int, size: int, step: int, segment: int) -> RoundPeers:
    radices = fewest_factors(size, k + 1)
    assert radices is not None, "size_error refuses such sizes"
    return symmetric_peers(hypercube_edges(rank, radices, step))


def _hypercube_period(k: int, size: int) -> int:
    return max(1, len(fewest_factors(size, k + 1) or ()))


def _hypercube_size_error(size: int) -> str | None:
    if size & (size - 1) == 0:
        return None
    below = 1 << (size.bit_length() - 1)
    return f"needs a power of two: {below} or {2 * below}, not {size}"


def _hyper_hypercube_size_error(k: int, size: int) -> str | None:
    if fewest_factors(size, k + 1) is not None:
        return None
    below = next(n for n in range(size - 1, 0, -1) if fewest_factors(n, k + 1) is not None)
    above = next(n for n in count(size + 1) if fewest_factors(n, k + 1) is not None)
    smallest_k = next(
        other for other in count(k + 1) if fewest_factors(size, other + 1) is not None
    )
    return (
        f"with k = {k} needs a size without prime factors above {k + 1}: {below} or {above}, "
        f"not {size}; or k = {smallest_k}"
    )


# --- Base-(k+1) graphs ---


def base_graph(k: int = 1) -> Topology:
    """Return the Base-(k+1) graph: blocks or the simple graph, whichever has the shorter period.

    With n = p q, where q has no prime factor up to k+1, p blocks of q ranks run the simple graph in
    parallel. Then ranks with the same index in their blocks run a hyper-hypercube.
    """
    check_max_peers(k)
    return Topology("base", partial(_base_graph_peers, k), partial(_base_graph_period, k))


def simple_base_graph(k: int = 1) -> Topology:
    """Return the Simple Base-(k+1) graph; it is the hyper-hypercube where n has one.

    The note in the module docstring describes the other sizes.
    """
    check_max_peers(k)
    return Topology(
        "simple-base", partial(_simple_base_graph_peers, k), partial(_simple_base_graph_period, k)
    )


class _Part(NamedTuple):
    """The ranks of one digit of n: ``copies`` hypercubes of ``width`` = (k+1)^``digits`` ranks."""

    first: int
    copies: int
    width: int
    digits: int

    @property
    def size(self) -> int:
        return self.copies * self.width


@lru_cache(maxsize=256)
def _parts(size: int, base: int) -> tuple[_Part, ...]:
    """Return the parts of ``size`` ranks, largest first."""
    sizes, rest = list[tuple[int, int, int]](), size
    for digits in range(size.bit_length(), -1, -1):
        copies, rest = divmod(rest, base**digits)
        if copies:
            sizes.append((copies, base**digits, digits))
    firsts = accumulate((copies * width for copies, width, _ in sizes), initial=0)
    return tuple(_Part(first, *each) for first, each in zip(firsts, sizes, strict=False))


@lru_cache(maxsize=1024)
def _num_blocks(size: int, k: int) -> int:
    """Return p, the number of parallel blocks; 1 where blocks do not shorten the period."""
    blocks = size
    for factor in range(k + 2, size + 1):
        while blocks % factor == 0 and fewest_factors(factor, k + 1) is None:
            blocks //= factor
    cube = fewest_factors(blocks, k + 1)
    assert cube is not None, "only factors up to k + 1 remain"
    length = _simple_base_graph_period(k, size // blocks) + len(cube)
    return blocks if length < _simple_base_graph_period(k, size) else 1


def _base_graph_period(k: int, size: int) -> int:
    blocks = _num_blocks(size, k)
    return _simple_base_graph_period(k, size // blocks) + len(fewest_factors(blocks, k + 1) or ())


def _base_graph_peers(k: int, rank: int, size: int, step: int, segment: int) -> RoundPeers:
    blocks = _num_blocks(size, k)
    width = size // blocks
    block, position = divmod(rank, width)
    round_index, simple_rounds = (
        step % _base_graph_period(k, size),
        _simple_base_graph_period(k, width),
    )
    if round_index < simple_rounds:
        return symmetric_peers(
            shift_edges(_simple_base_graph_edges(k, position, width, round_index), block * width)
        )
    between_blocks = hypercube_edges(
        block, fewest_factors(blocks, k + 1) or (), round_index - simple_rounds
    )
    return symmetric_peers(shift_edges(between_blocks, position, stride=width))


def _simple_base_graph_period(k: int, size: int) -> int:
    cube = fewest_factors(size, k + 1)
    if cube is not None:
        return max(1, len(cube))
    largest = _parts(size, k + 1)[0]
    return len(_part_radices(largest, k)) + 1 + largest.digits


def _simple_base_graph_peers(k: int, rank: int, size: int, step: int, segment: int) -> RoundPeers:
    return symmetric_peers(
        _simple_base_graph_edges(k, rank, size, step % _simple_base_graph_period(k, size))
    )


def _simple_base_graph_edges(
    k: int, position: int, size: int, round_index: int
) -> tuple[Edge, ...]:
    """Return the edges of ``position`` in round ``round_index`` of a period."""
    cube = fewest_factors(size, k + 1)
    if cube is not None:
        return hypercube_edges(position, cube, round_index)
    parts = _parts(size, k + 1)
    part_index = next(i for i, part in enumerate(parts) if position < part.first + part.size)
    # The part that exchanges with all later parts in this round; negative before the first one.
    exchanging_part = round_index - len(_part_radices(parts[0], k))
    if exchanging_part < 0 or part_index == len(parts) - 1 <= exchanging_part:
        return _edges_in_part(position, parts[part_index], k, round_index)
    if exchanging_part < part_index:
        return _edges_to_earlier_part(position, parts[exchanging_part], size)
    if exchanging_part == part_index:
        return _edges_to_later_parts(position, parts[part_index], size, k)
    return _edges_in_copy(position, parts[part_index], k, exchanging_part - part_index - 1)


def _part_radices(part: _Part, k: int) -> tuple[int, ...]:
    return (k + 1,) * part.digits + ((part.copies,) if part.copies > 1 else ())


def _edges_in_part(position: int, part: _Part, k: int, round_index: int) -> tuple[Edge, ...]:
    """Return the edges that average over the whole part.

    A part that is done early repeats its rounds, which changes nothing.
    """
    return shift_edges(
        hypercube_edges(position - part.first, _part_radices(part, k), round_index), part.first
    )


def _edges_in_copy(position: int, part: _Part, k: int, round_index: int) -> tuple[Edge, ...]:
    first = position - (position - part.first) % part.width
    return shift_edges(
        hypercube_edges(position - first, (k + 1,) * part.digits, round_index), first
    )


def _edges_to_earlier_part(position: int, part: _Part, size: int) -> tuple[Edge, ...]:
    """Return the edges of a later rank: to the rank of the same index in every copy of ``part``."""
    weight = part.width / (size - part.first)
    index = position - (part.first + part.size)
    return tuple(
        Edge(part.first + copy * part.width + index, weight) for copy in range(part.copies)
    )


def _edges_to_later_parts(position: int, part: _Part, size: int, k: int) -> tuple[Edge, ...]:
    """Return the edge of a rank of ``part`` to a rank of the later parts.

    Ranks without a counterpart there average among themselves, k+1 together. Their values differ
    only by updates made since the period began.
    """
    rest = part.first + part.size
    copy, index = divmod(position - part.first, part.width)
    num_matched = size - rest
    if index < num_matched:
        return (Edge(rest + index, part.width / (size - part.first)),)
    num_unmatched = part.width - num_matched
    unmatched_index = copy * num_unmatched + index - num_matched
    start = unmatched_index - unmatched_index % (k + 1)
    stop = min(start + k + 1, num_unmatched * part.copies)
    return tuple(
        Edge(
            part.first + other // num_unmatched * part.width + num_matched + other % num_unmatched,
            1 / (stop - start),
        )
        for other in range(start, stop)
        if other != unmatched_index
    )

"""Hypercubes: ranks as digits of a number, each round averaging along one digit.

After the rounds of all digits everybody has the mean, exactly. Digits are binary in the
hypercube, of mixed radix in the hyper-hypercube.
"""

from functools import lru_cache, partial
from itertools import count

from stretto.errors import ConfigError
from stretto.topology.mixing import Edge, Peers, Topology, exchange


def hypercube() -> Topology:
    """Return the hypercube: in round t a rank exchanges with the one whose bit t is the other.

    One peer a round, the mean after any log2 n rounds in a row; powers of two only.
    """
    return Topology("hypercube", partial(_cube, 1), partial(_period, 1), _refuses_cube)


def hyper_hypercube(k: int = 1) -> Topology:
    """Return the cube of mixed radix: n as the fewest factors of at most k+1, a round for each.

    At most k peers a round; sizes with a prime factor above k+1 are refused. Takezawa et al.,
    2023, arXiv:2305.11420, algorithm 1.
    """
    check_k(k)
    return Topology(
        "hyper-hypercube", partial(_cube, k), partial(_period, k), partial(_refuses_hyper, k)
    )


def check_k(k: int) -> None:
    """Raise ConfigError unless ``k``, the most peers of a rank in a round, can be."""
    if k < 1:
        raise ConfigError(f"k must be at least 1 (the peers of a rank in one round), got {k}")


@lru_cache(maxsize=4096)
def factors(size: int, most: int) -> tuple[int, ...] | None:
    """Return the fewest factors of at most ``most`` whose product is ``size``, None without any."""
    if size == 1:
        return ()
    found = None
    for first in range(min(most, size), 1, -1):
        rest = factors(size // first, most) if size % first == 0 else None
        if rest is not None and (found is None or len(rest) + 1 < len(found)):
            found = (*rest, first)
    return found


def cube_edges(place: int, radices: tuple[int, ...], turn: int) -> tuple[Edge, ...]:
    """Return whom ``place`` exchanges with in round ``turn``: all who differ in that digit alone.

    Rounds repeat after the last digit. Without digits there is one place, and nobody else.
    """
    if not radices:
        return ()
    index = turn % len(radices)
    stride = 1
    for radix in radices[:index]:
        stride *= radix
    radix = radices[index]
    digit = place // stride % radix
    return tuple(
        Edge(place + (other - digit) * stride, 1.0 / radix)
        for other in range(radix)
        if other != digit
    )


def _cube(k: int, rank: int, size: int, step: int, segment: int) -> Peers:
    radices = factors(size, k + 1)
    assert radices is not None, "a size that was refused"
    return exchange(cube_edges(rank, radices, step))


def _period(k: int, size: int) -> int:
    return max(1, len(factors(size, k + 1) or ()))


def _refuses_cube(size: int) -> str | None:
    if size & (size - 1) == 0:
        return None
    below = 1 << (size.bit_length() - 1)
    return f"needs a power of two: {below} or {2 * below}, not {size}"


def _refuses_hyper(k: int, size: int) -> str | None:
    if factors(size, k + 1) is not None:
        return None
    below = next(n for n in range(size - 1, 0, -1) if factors(n, k + 1) is not None)
    above = next(n for n in count(size + 1) if factors(n, k + 1) is not None)
    enough = next(other for other in count(k + 1) if factors(size, other + 1) is not None)
    return (
        f"with k = {k} needs a size without prime factors above {k + 1}: {below} or {above}, "
        f"not {size}; or k = {enough}"
    )

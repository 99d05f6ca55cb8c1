"""EquiDyn: one peer at a random distance, the same for all; a rate that n does not worsen.

Song et al., 2022, arXiv:2210.07881, with all n-1 distances to draw from. A peer's value weighs
eta (n-1)/n.
"""

from functools import lru_cache, partial

from stretto.errors import ConfigError
from stretto.topology.circulant import circulant
from stretto.topology.keyed import REMEMBERED, below, no_period, words
from stretto.topology.mixing import Edge, Peers, Topology, exchange


def equidyn(seed: int = 0, eta: float = 0.5) -> Topology:
    """Return the directed one (OD-EquiDyn): all ranks tell the one as far ahead as was drawn.

    In expectation a round leaves 1 - 2 eta (1 - eta (n-1)/n) of the squared disagreement, in every
    direction alike.
    """
    _check_eta(eta)
    return Topology("equidyn", partial(_directed, seed, eta), period=no_period)


def undirected_equidyn(seed: int = 0, eta: float = 0.5) -> Topology:
    """Return the undirected one (OU-EquiDyn): pairs at the drawn distance; some may stay alone.

    From a drawn rank on, each in turn takes the one ahead of it, unless one of the two is taken.
    """
    _check_eta(eta)
    return Topology("undirected-equidyn", partial(_undirected, seed, eta), period=no_period)


def _check_eta(eta: float) -> None:
    if not 0.0 < eta < 1.0:
        raise ConfigError(f"eta must be above 0 and below 1, got {eta:g}; the usual one is 0.5")


def _directed(seed: int, eta: float, rank: int, size: int, step: int, segment: int) -> Peers:
    if size == 1:
        return Peers(1.0)
    distance, _ = _draw(size, seed, step, segment)
    return circulant(rank, size, [distance], eta * (size - 1) / size)


def _undirected(seed: int, eta: float, rank: int, size: int, step: int, segment: int) -> Peers:
    partner = _partners(size, seed, step, segment)[rank]
    return exchange([] if partner == rank else [Edge(partner, eta * (size - 1) / size)])


@lru_cache(maxsize=REMEMBERED)
def _draw(size: int, seed: int, step: int, segment: int) -> tuple[int, int]:
    """Return a distance of 1 to n-1, and where to begin."""
    one, other = words(2, seed=seed, step=step, segment=segment)
    return 1 + below(size - 1, one), below(size, other)


@lru_cache(maxsize=REMEMBERED)
def _partners(size: int, seed: int, step: int, segment: int) -> tuple[int, ...]:
    """Return everybody's partner; whoever is left over is their own."""
    distance, start = _draw(size, seed, step, segment)
    partners = list(range(size))
    for rank in (*range(start, size), *range(start)):
        ahead = (rank + distance) % size
        if partners[rank] == rank and partners[ahead] == ahead:
            partners[rank], partners[ahead] = ahead, rank
    return tuple(partners)

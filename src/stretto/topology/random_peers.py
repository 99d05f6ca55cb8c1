"""Random peers, drawn anew in every round of every segment: derangement and matching."""

from functools import lru_cache, partial

from stretto.topology import keyed
from stretto.topology.mixing import Edge, Peers, Topology, exchange


def derangement(seed: int = 0) -> Topology:
    """Return the topology in which ranks form a random circle: each tells one and hears another.

    Own and heard value weigh a half. In expectation a round leaves 1/2 (1 - 1/(n-1)) of the
    squared disagreement. Every peer is as likely as any other, unlike in the published code of
    Crossover-SGD (Yeo et al., 2020, arXiv:2012.15198).
    """
    return Topology("derangement", partial(_circle, seed), period=keyed.no_period)


def matching(seed: int = 0) -> Topology:
    """Return the topology of random pairs, who average; of an odd number one stays alone."""
    return Topology("matching", partial(_pair, seed), period=keyed.no_period)


def _circle(seed: int, rank: int, size: int, step: int, segment: int) -> Peers:
    if size == 1:
        return Peers(1.0)
    heard = keyed.cycle(size, seed, step, segment)
    told = _inverse_cycle(size, seed, step, segment)
    return Peers(0.5, (Edge(told[rank], 0.5),), (Edge(heard[rank], 0.5),))


@lru_cache(maxsize=keyed.REMEMBERED)
def _inverse_cycle(size: int, seed: int, step: int, segment: int) -> tuple[int, ...]:
    told = [0] * size
    for rank, heard in enumerate(keyed.cycle(size, seed, step, segment)):
        told[heard] = rank
    return tuple(told)


def _pair(seed: int, rank: int, size: int, step: int, segment: int) -> Peers:
    partner = _partners(size, seed, step, segment)[rank]
    return exchange([] if partner == rank else [Edge(partner, 0.5)])


@lru_cache(maxsize=keyed.REMEMBERED)
def _partners(size: int, seed: int, step: int, segment: int) -> tuple[int, ...]:
    """Return everybody's partner; whoever is left over is their own."""
    order = keyed.permutation(size, seed, step, segment)
    partners = list(range(size))
    for one, other in zip(order[::2], order[1::2], strict=False):
        partners[one], partners[other] = other, one
    return tuple(partners)

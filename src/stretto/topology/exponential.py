"""Exponential graphs: peers at distances 1, 2, 4, ..., all at once or one in each round."""

from stretto.topology.circulant import circulant
from stretto.topology.mixing import Peers, Topology


def static_exponential() -> Topology:
    """Return the graph in which a rank tells those 1, 2, 4, ... ahead, L = ceil(log2 n) of them.

    Its gap is 2/(1+L) for even n, at L messages a round. Ying et al., 2021, arXiv:2110.13363.
    """
    return Topology("static-exponential", _static)


def one_peer_exponential() -> Topology:
    """Return the graph in which a rank tells one peer, 2^(step mod L) ahead; L = ceil(log2 n).

    On a power of two of ranks any L rounds in a row reach the mean exactly; on other sizes
    disagreement shrinks geometrically. Assran et al., 2019, arXiv:1811.10792; Ying et al., 2021,
    arXiv:2110.13363.
    """
    return Topology("one-peer-exponential", _one_peer, period=lambda size: max(1, _reach(size)))


def _reach(size: int) -> int:
    """Return how many powers of two lie below ``size``."""
    return (size - 1).bit_length()


def _static(rank: int, size: int, step: int, segment: int) -> Peers:
    return circulant(rank, size, [1 << power for power in range(_reach(size))])


def _one_peer(rank: int, size: int, step: int, segment: int) -> Peers:
    if size == 1:
        return Peers(1.0)
    return circulant(rank, size, [1 << step % _reach(size)])

"""Topologies with simple rules: complete, ring, exponential graphs, random peers and EquiDyn."""

from collections.abc import Collection
from functools import lru_cache, partial

from stretto.errors import ConfigError
from stretto.topology import keyed_random as keyed
from stretto.topology.keyed_random import DRAW_CACHE_SIZE, no_period, random_words, word_to_index
from stretto.topology.round_peers import Edge, RoundPeers, Topology, symmetric_peers

# --- Circulant graphs: every rank has peers at the same distances ---


def complete() -> Topology:
    """Return the complete graph, which reaches the exact mean in one round.

    Each rank sends n-1 messages. It serves as a reference for the other topologies.
    """
    return Topology("complete", _complete_peers)


def ring() -> Topology:
    """Return the ring: each rank averages with its two neighbours, with weights of 1/3.

    Its spectral gap falls as 1/n^2, so it suits teaching, or up to about 8 ranks.
    Lian et al., 2017, arXiv:1705.09056.
    """
    return Topology("ring", _ring_peers)


def circulant_peers(
    rank: int, size: int, distances: Collection[int], weight: float | None = None
) -> RoundPeers:
    """Return the peers of a round in which every rank sends to the ranks ``distances`` ahead.

    Distances differ from each other and from 0 modulo ``size``. ``weight`` is that of each received
    value; by default all values, including the rank's own, have equal weights. The round is doubly
    stochastic, because every rank sends and receives with the same weights.
    """
    if weight is None:
        weight = 1.0 / (len(distances) + 1)
    return RoundPeers(
        1.0 - weight * len(distances),
        tuple(Edge((rank + distance) % size, weight) for distance in distances),
        tuple(Edge((rank - distance) % size, weight) for distance in distances),
    )


def _complete_peers(rank: int, size: int, step: int, segment: int) -> RoundPeers:
    return circulant_peers(rank, size, range(1, size))


def _ring_peers(rank: int, size: int, step: int, segment: int) -> RoundPeers:
    # Of two ranks, each has one neighbour, which is on both sides. A single rank has none.
    return circulant_peers(rank, size, sorted({1 % size, (size - 1) % size} - {0}))


def static_exponential() -> Topology:
    """Return the graph in which a rank sends to the L = ceil(log2 n) ranks 1, 2, 4, ... ahead.

    Its spectral gap is 2/(1+L) for even n, with L messages in a round.
    Ying et al., 2021, arXiv:2110.13363.
    """
    return Topology("static-exponential", _static_exponential_peers)


def one_peer_exponential() -> Topology:
    """Return the graph in which a rank sends to one peer, 2^(step mod L) ahead; L = ceil(log2 n).

    If n is a power of two, any L consecutive rounds reach the exact mean. For other n disagreement
    shrinks geometrically. Assran et al., 2019, arXiv:1811.10792; Ying et al., 2021,
    arXiv:2110.13363.
    """
    return Topology(
        "one-peer-exponential",
        _one_peer_exponential_peers,
        period=lambda size: max(1, _num_powers_of_two(size)),
    )


def _num_powers_of_two(size: int) -> int:
    """Return the number of powers of two below ``size``."""
    return (size - 1).bit_length()


def _static_exponential_peers(rank: int, size: int, step: int, segment: int) -> RoundPeers:
    return circulant_peers(rank, size, [1 << power for power in range(_num_powers_of_two(size))])


def _one_peer_exponential_peers(rank: int, size: int, step: int, segment: int) -> RoundPeers:
    if size == 1:
        return RoundPeers(1.0)
    return circulant_peers(rank, size, [1 << step % _num_powers_of_two(size)])


# --- EquiDyn: one peer at a random distance, with a consensus rate that does not depend on n ---


def equidyn(seed: int = 0, eta: float = 0.5) -> Topology:
    """Return OD-EquiDyn (directed): all ranks send to the rank at one random distance ahead.

    The distance is uniform over 1 to n-1, and a peer's value has the weight eta (n-1)/n. In
    expectation a round leaves a fraction 1 - 2 eta (1 - eta (n-1)/n) of the squared disagreement,
    the same in every direction. Song et al., 2022, arXiv:2210.07881.
    """
    _check_eta(eta)
    return Topology("equidyn", partial(_equidyn_peers, seed, eta), period=no_period)


def undirected_equidyn(seed: int = 0, eta: float = 0.5) -> Topology:
    """Return OU-EquiDyn (undirected): pairs of ranks at one random distance average.

    Starting at a random rank, each rank in turn is paired with the rank at the distance ahead,
    unless one of the two already has a partner. Some ranks may have none.
    Song et al., 2022, arXiv:2210.07881.
    """
    _check_eta(eta)
    return Topology(
        "undirected-equidyn", partial(_undirected_equidyn_peers, seed, eta), period=no_period
    )


def _check_eta(eta: float) -> None:
    if not 0.0 < eta < 1.0:
        raise ConfigError(f"eta must be above 0 and below 1, got {eta:g}; the usual value is 0.5")


def _equidyn_peers(
    seed: int, eta: float, rank: int, size: int, step: int, segment: int
) -> RoundPeers:
    if size == 1:
        return RoundPeers(1.0)
    distance, _ = _draw_distance_and_start(size, seed, step, segment)
    return circulant_peers(rank, size, [distance], eta * (size - 1) / size)


def _undirected_equidyn_peers(
    seed: int, eta: float, rank: int, size: int, step: int, segment: int
) -> RoundPeers:
    partner = _equidyn_partners(size, seed, step, segment)[rank]
    return symmetric_peers([] if partner == rank else [Edge(partner, eta * (size - 1) / size)])


@lru_cache(maxsize=DRAW_CACHE_SIZE)
def _draw_distance_and_start(size: int, seed: int, step: int, segment: int) -> tuple[int, int]:
    """Return a random distance of 1 to n-1, and a random first rank."""
    distance_word, start_word = random_words(2, seed=seed, step=step, segment=segment)
    return 1 + word_to_index(size - 1, distance_word), word_to_index(size, start_word)


@lru_cache(maxsize=DRAW_CACHE_SIZE)
def _equidyn_partners(size: int, seed: int, step: int, segment: int) -> tuple[int, ...]:
    """Return the partner of every rank; a rank without a partner has itself."""
    distance, start = _draw_distance_and_start(size, seed, step, segment)
    partners = list(range(size))
    for rank in (*range(start, size), *range(start)):
        ahead = (rank + distance) % size
        if partners[rank] == rank and partners[ahead] == ahead:
            partners[rank], partners[ahead] = ahead, rank
    return tuple(partners)


# --- Random peers, drawn for each round and segment ---


def derangement(seed: int = 0) -> Topology:
    """Return the random directed cycle: each rank sends to the next and receives from the previous.

    Own and received value have weights of 1/2. In expectation a round leaves a fraction
    1/2 (1 - 1/(n-1)) of the squared disagreement. All peers are equally likely, unlike in the
    published code of Crossover-SGD (Yeo et al., 2020, arXiv:2012.15198).
    """
    return Topology("derangement", partial(_derangement_peers, seed), period=keyed.no_period)


def matching(seed: int = 0) -> Topology:
    """Return random pairs that average; one rank has no partner if the number of ranks is odd."""
    return Topology("matching", partial(_matching_peers, seed), period=keyed.no_period)


def _derangement_peers(seed: int, rank: int, size: int, step: int, segment: int) -> RoundPeers:
    if size == 1:
        return RoundPeers(1.0)
    sender_of = keyed.random_cycle(size, seed, step, segment)
    receiver_of = _inverse_cycle(size, seed, step, segment)
    return RoundPeers(0.5, (Edge(receiver_of[rank], 0.5),), (Edge(sender_of[rank], 0.5),))


@lru_cache(maxsize=keyed.DRAW_CACHE_SIZE)
def _inverse_cycle(size: int, seed: int, step: int, segment: int) -> tuple[int, ...]:
    receiver_of = [0] * size
    for rank, sender in enumerate(keyed.random_cycle(size, seed, step, segment)):
        receiver_of[sender] = rank
    return tuple(receiver_of)


def _matching_peers(seed: int, rank: int, size: int, step: int, segment: int) -> RoundPeers:
    partner = _matching_partners(size, seed, step, segment)[rank]
    return symmetric_peers([] if partner == rank else [Edge(partner, 0.5)])


@lru_cache(maxsize=keyed.DRAW_CACHE_SIZE)
def _matching_partners(size: int, seed: int, step: int, segment: int) -> tuple[int, ...]:
    """Return the partner of every rank; a rank without a partner has itself."""
    order = keyed.random_permutation(size, seed, step, segment)
    partners = list(range(size))
    for one, other in zip(order[::2], order[1::2], strict=False):
        partners[one], partners[other] = other, one
    return tuple(partners)

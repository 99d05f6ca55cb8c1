"""Prices as formulas, for the algorithms that have one; a law ties them to the engine.

In the letters of the papers: alpha per message, beta per byte sent, gamma per byte added, N bytes,
n ranks; with ``_l`` inside a host. They hold where nothing else costs anything: no core-seconds for
messages, a core for every rank, equal chunks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stretto.sim.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Letters:
    """A cluster and a tensor in the letters of the papers."""

    n: int
    k: int
    """Ranks of each host."""
    N: float
    alpha: float
    beta: float
    gamma: float
    alpha_l: float
    beta_l: float

    @property
    def fold(self) -> float:
        """Two more messages where n is no power of two, one of them added."""
        alone = self.n == 1 << (self.n.bit_length() - 1)
        return 0.0 if alone else 2 * (self.alpha + self.N * self.beta) + self.N * self.gamma


def closed_form(name: str, num_bytes: int, cluster: Cluster) -> float | None:
    """Return the seconds that the formula of algorithm ``name`` gives, None where it has none.

    Flat algorithms have one where every host has one rank, the others where all have as many.
    """
    each = set(cluster.ranks_per_host)
    formula = FORMULAS.get(name)
    if formula is None or len(each) > 1 or (name not in _OF_HOSTS and each != {1}):
        return None
    out, inside = cluster.between, cluster.inside
    return formula(
        Letters(
            n=cluster.mesh.size,
            k=each.pop(),
            N=num_bytes,
            alpha=out.latency_s,
            beta=1 / out.bytes_per_s,
            gamma=cluster.cpu.s_per_byte_added,
            alpha_l=inside.latency_s,
            beta_l=1 / inside.bytes_per_s,
        )
    )


def _gather_broadcast(c: Letters) -> float:
    return 2 * (c.n - 1) * (c.alpha + c.N * c.beta) + (c.n - 1) * c.N * c.gamma


def _binomial(c: Letters) -> float:
    return (c.n - 1).bit_length() * (2 * (c.alpha + c.N * c.beta) + c.N * c.gamma)


def _doubling(c: Letters) -> float:
    exchanges = c.n.bit_length() - 1
    return exchanges * (c.alpha + c.N * c.beta + c.N * c.gamma) + c.fold


def _halving_doubling(c: Letters) -> float:
    steps = c.n.bit_length() - 1
    share = 1 - 1 / (1 << steps)
    return 2 * steps * c.alpha + share * c.N * (2 * c.beta + c.gamma) + c.fold


def _ring(c: Letters) -> float:
    return 2 * (c.n - 1) * c.alpha + (c.n - 1) / c.n * c.N * (2 * c.beta + c.gamma)


def _torus(c: Letters) -> float:
    row = max(x for x in range(1, c.n + 1) if c.n % x == 0 and x * x <= c.n)
    steps = 2 * (row + c.n // row - 2)
    return steps * c.alpha + (c.n - 1) / c.n * c.N * (2 * c.beta + c.gamma)


def _inside(c: Letters) -> float:
    """Reduce-scatter and all-gather inside hosts."""
    return 2 * (c.k - 1) * c.alpha_l + (c.k - 1) / c.k * c.N * (2 * c.beta_l + c.gamma)


def _hierarchical(c: Letters) -> float:
    m = c.n // c.k
    between = 2 * (m - 1) * c.alpha + (m - 1) / m * c.N * (2 * c.beta + c.gamma / c.k)
    return _inside(c) + between


def _hierarchical_doubling(c: Letters) -> float:
    m = c.n // c.k
    steps = m.bit_length() - 1
    each = c.alpha + c.N * c.beta + c.N / c.k * c.gamma
    extra = 0.0 if m == 1 << steps else 2 * (c.alpha + c.N * c.beta) + c.N / c.k * c.gamma
    return _inside(c) + steps * each + extra


def _masters(c: Letters) -> float:
    """A host's ranks hand over and are handed their parts one at a time."""
    m = c.n // c.k
    between = 2 * (m - 1) * c.alpha + (m - 1) / m * c.N * (2 * c.beta + c.gamma)
    to_and_from = 2 * (c.k - 1) * (c.alpha_l + c.N / c.k * c.beta_l)
    return _inside(c) + to_and_from + between


FORMULAS: Mapping[str, Callable[[Letters], float]] = {
    "gather-broadcast": _gather_broadcast,
    "binomial": _binomial,
    "doubling": _doubling,
    "halving-doubling": _halving_doubling,
    "ring": _ring,
    "torus": _torus,
    "masters": _masters,
    "hierarchical": _hierarchical,
    "hierarchical-doubling": _hierarchical_doubling,
}
_OF_HOSTS = {"masters", "hierarchical", "hierarchical-doubling"}

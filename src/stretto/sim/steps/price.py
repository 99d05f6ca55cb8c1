"""The price of a training step: seconds, what of them is communication, and what holds it up."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.comm.algorithms.table import AlgorithmTable
from stretto.sim.charge import CORES, INSIDE, LATENCY, LINK, THREAD
from stretto.sim.cluster import Cluster
from stretto.sim.steps.pace import Carriage, Paced, find_pace
from stretto.sim.steps.rhythm import Rhythm
from stretto.sim.steps.sums import SumCosts
from stretto.sim.steps.talks import OUT, Talk, every_rank, stand_in, toll
from stretto.sim.steps.visits import Whom, part_of, visits

COMPUTATION = "computation"
MOST_MESSAGES = 200
"""Messages of a period, all ranks together, up to which every rank is followed."""
_HIDDEN = 0.01
"""Below this share of a step, what is exposed holds nobody up."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What a step takes, in the mean over a period."""

    seconds: float
    compute_s: float
    """What it takes where nobody says anything."""
    bytes_per_link: float
    """What the busiest host sends to others."""
    bound_s: float
    """What no step with so many bytes can be faster than."""
    spent_s: Mapping[str, float]
    """The seconds of its messages, one after another, by what they are spent on."""

    @property
    def exposed_s(self) -> float:
        """Return what communication adds to computation."""
        added_s = self.seconds - self.compute_s
        return added_s if added_s > _ROUNDING * self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """Return which share of the step is computation."""
        return self.compute_s / self.seconds if self.seconds else 1.0

    @property
    def held_up_by(self) -> str:
        """Return what holds it up most."""
        if self.exposed_s <= _HIDDEN * self.seconds or not self.spent_s:
            return COMPUTATION
        return max(self.spent_s, key=lambda sort: self.spent_s[sort])

    def facts(self) -> dict[str, float | str]:
        """Return everything by name, for programs."""
        return {
            "step_s": self.seconds,
            "compute_s": self.compute_s,
            "exposed_s": self.exposed_s,
            "bound_s": self.bound_s,
            "efficiency": self.efficiency,
            "bytes_per_link": self.bytes_per_link,
            "held_up_by": self.held_up_by,
        }


def price_sums(rhythm: Rhythm, table: AlgorithmTable, cluster: Cluster) -> StepPrice:
    """Return the price where exchanges are sums over all ranks, carried as ``table`` says.

    Raises:
        StrettoError: A sum is too large to be followed.
    """
    costs = SumCosts(table, cluster)
    each = [costs.of(exchange.num_bytes) for exchange in rhythm.exchanges]
    spent_s: dict[str, float] = {}
    for cost in each:
        for sort, took in cost.spent_s.items():
            spent_s[sort] = spent_s.get(sort, 0.0) + took
    num_bytes = sum(cost.bytes_per_link for cost in each)
    paced = find_pace(rhythm, costs.carriage())
    return _bill(rhythm, cluster, paced, num_bytes, spent_s)


def price_talks(rhythm: Rhythm, talk: Talk, cluster: Cluster) -> StepPrice:
    """Return the price where exchanges are with peers, a round in each period.

    Few ranks are all followed; of many, one stands for all (a law ties the two).
    """
    followed = cluster.mesh.size * len(rhythm.exchanges) <= MOST_MESSAGES
    carriage = every_rank(talk, cluster) if followed else stand_in(rhythm, talk, cluster)
    return _price_messages(rhythm, carriage, cluster)


def price_visits(rhythm: Rhythm, whom: Whom, most_ahead: int, cluster: Cluster) -> StepPrice:
    """Return the price where some ranks visit others beside their steps, and these only answer.

    Ranks are at most ``most_ahead`` periods ahead of the slowest. Of many hosts, some stand for
    all.
    """
    part = part_of(cluster)
    return _price_messages(rhythm, visits(part, whom, most_ahead), part)


def _price_messages(rhythm: Rhythm, carriage: Carriage, cluster: Cluster) -> StepPrice:
    paced = find_pace(rhythm, carriage)
    out_s = sum(busy for name, busy in paced.busy_s.items() if name.startswith(OUT))
    num_bytes = out_s / carriage.hosts * cluster.between.bytes_per_s
    return _bill(rhythm, cluster, paced, num_bytes, _spent(rhythm, cluster, paced))


def _spent(rhythm: Rhythm, cluster: Cluster, paced: Paced) -> dict[str, float]:
    """Return how long the busiest of each sort works in a period, and what waits come to."""
    spent_s = {
        sort: max((busy for name, busy in paced.busy_s.items() if name.startswith(sort)), default=0)
        for sort in (LINK, CORES, THREAD)
    }
    inside_s = sum(toll(cluster, e.num_bytes, between=False).work_s for e in rhythm.exchanges)
    outside = bool(spent_s[LINK])
    latency_s = cluster.between.latency_s if outside else cluster.inside.latency_s
    hops = Counter[int]()
    for exchange in rhythm.exchanges:
        hops[exchange.lane] += exchange.hops
    talks = bool(paced.busy_s)
    return spent_s | {
        INSIDE: inside_s * (talks and not outside),
        LATENCY: latency_s * max(hops.values(), default=0) * talks,
    }


def _bill(
    rhythm: Rhythm,
    cluster: Cluster,
    paced: Paced,
    num_bytes: float,
    spent_s: Mapping[str, float],
) -> StepPrice:
    steps = rhythm.steps
    compute_s, per_link = rhythm.compute_s / steps, num_bytes / steps
    bound_s = max(compute_s, per_link / cluster.between.bytes_per_s)
    each_s = {sort: took / steps for sort, took in spent_s.items()}
    return StepPrice(paced.period_s / steps, compute_s, per_link, bound_s, each_s)

"""Predict the time of a training step, the exposed communication in it, and its bottleneck.

`price_exchanges_by_all_reduce` prices exchanges that all ranks sum, `price_peer_exchanges` gossip
and `price_pairwise_averaging` AD-PSGD. How exchanges overlap with computation is simulated in
`stretto.simulator.step_timeline`; which exchanges a strategy makes is in
`stretto.studies.strategy_prices`.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from stretto.collectives.algorithm_table import AlgorithmChoice, AlgorithmTable
from stretto.collectives.schedule import pipeline_tensor
from stretto.simulator.algorithm_choice import BACK_TO_BACK
from stretto.simulator.cluster import Cluster
from stretto.simulator.message_costs import CORES, INSIDE, LATENCY, LINK, THREAD
from stretto.simulator.peer_exchanges import (
    LINK_OUT,
    ChoosePeer,
    ExchangePattern,
    message_cost,
    representative_cluster,
    traffic_of_every_rank,
    traffic_of_pairwise_averaging,
    traffic_of_representative,
)
from stretto.simulator.price import price
from stretto.simulator.step_timeline import (
    Exchange,
    MessageFlow,
    SteadyState,
    StepTimeline,
    TrafficModel,
    find_steady_state,
)

# --- all-reduces, as messages one after another ---

ALL_REDUCE_RESOURCE = "sums"
"""The only resource of all-reduces: all links and cores of the ranks together."""
_MAX_BACK_TO_BACK_RANKS = 256
"""Up to this many ranks, consecutive all-reduces are simulated; with more it takes minutes."""


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """The cost of one all-reduce."""

    isolated_s: float
    """Seconds from start to end."""
    interval_s: float
    """Seconds between the ends of consecutive all-reduces.

    Smaller than ``isolated_s`` where phases have their own lanes: the next all-reduce then starts
    before this one ends.
    """
    bytes_per_link: float
    """Bytes that the busiest host sends to other hosts."""
    breakdown_s: Mapping[str, float]
    """The isolated seconds by kind of bottleneck."""


class AllReduceCosts:
    """The costs of a table's all-reduces on one cluster, interpolated between powers of four."""

    def __init__(self, table: AlgorithmTable, cluster: Cluster) -> None:
        self._table, self._cluster = table, cluster
        self._cached_price = cache(self._price)

    def cost_of(self, num_bytes: float) -> AllReduceCost:
        """Return the cost of an all-reduce of ``num_bytes``."""
        choice = self._table.pick(round(num_bytes))
        low = 4 ** math.floor(math.log(max(num_bytes, 1), 4))
        if num_bytes <= low:
            return self._cached_price(choice, low)
        share = (num_bytes / low - 1) / 3
        return _interpolate(
            self._cached_price(choice, low), self._cached_price(choice, 4 * low), share
        )

    def traffic(self) -> TrafficModel:
        """Return the traffic of one representative rank: one message for each all-reduce."""

        def flows(_period: int, exchange: Exchange) -> list[MessageFlow]:
            cost = self.cost_of(exchange.num_bytes)
            arrival_delay_s = cost.isolated_s - cost.interval_s
            return [
                MessageFlow(
                    0,
                    0,
                    cost.interval_s,
                    uses={ALL_REDUCE_RESOURCE: 1.0},
                    arrival_delay_s=arrival_delay_s,
                )
            ]

        return TrafficModel(1, flows)

    def _price(self, choice: AlgorithmChoice, num_bytes: int) -> AllReduceCost:
        mesh = self._cluster.mesh
        schedule = choice.schedule(mesh)
        isolated = price(schedule, num_bytes, self._cluster)
        interval_s = isolated.seconds
        if (
            len({op.lane for op in schedule.program(0)}) > 1
            and mesh.size <= _MAX_BACK_TO_BACK_RANKS
        ):
            back_to_back = price(
                pipeline_tensor(schedule, BACK_TO_BACK), BACK_TO_BACK * num_bytes, self._cluster
            )
            interval_s = min(
                interval_s, (back_to_back.seconds - isolated.seconds) / (BACK_TO_BACK - 1)
            )
        return AllReduceCost(
            isolated.seconds, interval_s, isolated.bytes_per_link, isolated.breakdown_s
        )


def _interpolate(low: AllReduceCost, high: AllReduceCost, share: float) -> AllReduceCost:
    """Return the cost at ``share`` of the way from ``low`` to ``high``."""

    def lerp(one: float, other: float) -> float:
        return one + (other - one) * share

    breakdown_s = {
        kind: lerp(took, high.breakdown_s[kind]) for kind, took in low.breakdown_s.items()
    }
    return AllReduceCost(
        lerp(low.isolated_s, high.isolated_s),
        lerp(low.interval_s, high.interval_s),
        lerp(low.bytes_per_link, high.bytes_per_link),
        breakdown_s,
    )


# --- steps ---

COMPUTATION = "computation"
"""The bottleneck of a step with negligible exposed communication."""
MAX_FULLY_SIMULATED_MESSAGES = 200
"""Up to this many messages in a period, over all ranks, every rank is simulated."""
_NEGLIGIBLE_SHARE = 0.01
"""Exposed communication up to this share of a step is not a bottleneck."""
_ROUNDING = 1e-9
"""Exposed communication up to this share of a step is rounding."""


@dataclass(frozen=True, slots=True)
class StepPrice:
    """The predicted time of a step, as the mean over a period."""

    seconds: float
    compute_s: float
    """Seconds of the step without any communication."""
    bytes_per_link: float
    """Bytes that the busiest host sends to other hosts in a step."""
    bound_s: float
    """Lower bound on the step time: the larger of computation and link time."""
    breakdown_s: Mapping[str, float]
    """Seconds of communication without any overlap, by kind of bottleneck."""

    @property
    def exposed_s(self) -> float:
        """Return the seconds that communication adds to computation."""
        added_s = self.seconds - self.compute_s
        return added_s if added_s > _ROUNDING * self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """Return the share of computation in the step."""
        return self.compute_s / self.seconds if self.seconds else 1.0

    @property
    def bottleneck(self) -> str:
        """Return `COMPUTATION`, or the kind of resource that communication spends most time on."""
        if self.exposed_s <= _NEGLIGIBLE_SHARE * self.seconds or not self.breakdown_s:
            return COMPUTATION
        return max(self.breakdown_s, key=lambda kind: self.breakdown_s[kind])

    def facts(self) -> dict[str, float | str]:
        """Return all figures by name, as in JSON records."""
        return {
            "step_s": self.seconds,
            "compute_s": self.compute_s,
            "exposed_s": self.exposed_s,
            "bound_s": self.bound_s,
            "efficiency": self.efficiency,
            "bytes_per_link": self.bytes_per_link,
            "held_up_by": self.bottleneck,
        }


def price_exchanges_by_all_reduce(
    step_timeline: StepTimeline, table: AlgorithmTable, cluster: Cluster
) -> StepPrice:
    """Return the step price where exchanges are all-reduces with the algorithms of ``table``.

    Raises:
        StrettoError: The schedule of an all-reduce is too large to simulate.
    """
    costs = AllReduceCosts(table, cluster)
    each = [costs.cost_of(exchange.num_bytes) for exchange in step_timeline.exchanges]
    breakdown_s: dict[str, float] = {}
    for cost in each:
        for kind, took in cost.breakdown_s.items():
            breakdown_s[kind] = breakdown_s.get(kind, 0.0) + took
    num_bytes = sum(cost.bytes_per_link for cost in each)
    steady_state = find_steady_state(step_timeline, costs.traffic())
    return _make_step_price(step_timeline, cluster, steady_state, num_bytes, breakdown_s)


def price_peer_exchanges(
    step_timeline: StepTimeline, pattern: ExchangePattern, cluster: Cluster
) -> StepPrice:
    """Return the step price where exchanges are with the peers of ``pattern``, as in gossip.

    With few messages every rank is simulated, else one rank that represents all. A test ties the
    two.
    """
    is_fully_simulated = (
        cluster.mesh.size * len(step_timeline.exchanges) <= MAX_FULLY_SIMULATED_MESSAGES
    )
    traffic = (
        traffic_of_every_rank(pattern, cluster)
        if is_fully_simulated
        else traffic_of_representative(step_timeline, pattern, cluster)
    )
    return _price_messages(step_timeline, traffic, cluster)


def price_pairwise_averaging(
    step_timeline: StepTimeline, choose_peer: ChoosePeer, max_ahead: int, cluster: Cluster
) -> StepPrice:
    """Return the step price of AD-PSGD: active ranks average with passive peers during steps.

    Ranks are at most ``max_ahead`` periods ahead of the slowest. Of a large cluster only some hosts
    are simulated.
    """
    subset = representative_cluster(cluster)
    return _price_messages(
        step_timeline, traffic_of_pairwise_averaging(subset, choose_peer, max_ahead), subset
    )


def _price_messages(
    step_timeline: StepTimeline, traffic: TrafficModel, cluster: Cluster
) -> StepPrice:
    steady_state = find_steady_state(step_timeline, traffic)
    out_s = sum(busy for name, busy in steady_state.busy_s.items() if name.startswith(LINK_OUT))
    num_bytes = out_s / traffic.hosts * cluster.between.bytes_per_s
    return _make_step_price(
        step_timeline,
        cluster,
        steady_state,
        num_bytes,
        _time_breakdown(step_timeline, cluster, steady_state),
    )


def _time_breakdown(
    step_timeline: StepTimeline, cluster: Cluster, steady_state: SteadyState
) -> dict[str, float]:
    """Return the busy seconds of the busiest resource of each kind in a period, and latencies."""
    breakdown_s = {
        kind: max(
            (busy for name, busy in steady_state.busy_s.items() if name.startswith(kind)), default=0
        )
        for kind in (LINK, CORES, THREAD)
    }
    inside_s = sum(
        message_cost(cluster, e.num_bytes, between=False).work_s for e in step_timeline.exchanges
    )
    crosses_hosts = bool(breakdown_s[LINK])
    latency_s = cluster.between.latency_s if crosses_hosts else cluster.inside.latency_s
    hops = Counter[int]()
    for exchange in step_timeline.exchanges:
        hops[exchange.lane] += exchange.hops
    has_messages = bool(steady_state.busy_s)
    return breakdown_s | {
        INSIDE: inside_s * (has_messages and not crosses_hosts),
        LATENCY: latency_s * max(hops.values(), default=0) * has_messages,
    }


def _make_step_price(
    step_timeline: StepTimeline,
    cluster: Cluster,
    steady_state: SteadyState,
    num_bytes: float,
    breakdown_s: Mapping[str, float],
) -> StepPrice:
    steps = step_timeline.steps
    compute_s, per_link = step_timeline.compute_s / steps, num_bytes / steps
    bound_s = max(compute_s, per_link / cluster.between.bytes_per_s)
    each_s = {kind: took / steps for kind, took in breakdown_s.items()}
    return StepPrice(steady_state.period_s / steps, compute_s, per_link, bound_s, each_s)

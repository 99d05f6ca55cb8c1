"""Exchanges that all ranks sum, as messages one behind the other: each has the price of its sum.

A sum that has phases on lanes of their own lets the next one begin before it is over: it takes up
the ranks for as long as one of many in a row does, and arrives as late as one alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from stretto.comm.algorithms.table import AlgorithmTable, Choice
from stretto.comm.schedule import pipelined
from stretto.sim.choosing import IN_A_ROW
from stretto.sim.cluster import Cluster
from stretto.sim.price import price
from stretto.sim.steps.pace import Carriage, Flow
from stretto.sim.steps.rhythm import Exchange

SUMS = "sums"
"""The one resource: what the ranks have for sums, all their links together."""
_MOST_IN_A_ROW = 256
"""Ranks up to which a row of sums is followed: with more it takes minutes."""


@dataclass(frozen=True, slots=True)
class SumCost:
    """What one sum takes."""

    alone_s: float
    pace_s: float
    """How soon the next one is through, where many follow each other."""
    bytes_per_link: float
    """What the busiest host sends to others."""
    spent_s: Mapping[str, float]


class SumCosts:
    """What the sums of a table cost on one cluster; prices between powers of four lie on a line."""

    def __init__(self, table: AlgorithmTable, cluster: Cluster) -> None:
        self._table, self._cluster = table, cluster
        self._known = cache(self._priced)

    def of(self, num_bytes: float) -> SumCost:
        """Return what a sum of so many bytes takes."""
        choice = self._table.pick(round(num_bytes))
        low = 4 ** math.floor(math.log(max(num_bytes, 1), 4))
        if num_bytes <= low:
            return self._known(choice, low)
        share = (num_bytes / low - 1) / 3
        return _between(self._known(choice, low), self._known(choice, 4 * low), share)

    def carriage(self) -> Carriage:
        """Return one message for each sum, which all ranks have alike."""

        def flows(_period: int, exchange: Exchange) -> list[Flow]:
            cost = self.of(exchange.num_bytes)
            after_s = cost.alone_s - cost.pace_s
            return [Flow(0, 0, cost.pace_s, uses={SUMS: 1.0}, after_s=after_s)]

        return Carriage(1, flows)

    def _priced(self, choice: Choice, num_bytes: int) -> SumCost:
        mesh = self._cluster.mesh
        schedule = choice.schedule(mesh)
        alone = price(schedule, num_bytes, self._cluster)
        pace_s = alone.seconds
        if len({op.lane for op in schedule.program(0)}) > 1 and mesh.size <= _MOST_IN_A_ROW:
            row = price(pipelined(schedule, IN_A_ROW), IN_A_ROW * num_bytes, self._cluster)
            pace_s = min(pace_s, (row.seconds - alone.seconds) / (IN_A_ROW - 1))
        return SumCost(alone.seconds, pace_s, alone.bytes_per_link, alone.spent_s)


def _between(low: SumCost, high: SumCost, share: float) -> SumCost:
    """Return the cost at ``share`` of the way from one to the other."""

    def at(one: float, other: float) -> float:
        return one + (other - one) * share

    spent_s = {sort: at(took, high.spent_s[sort]) for sort, took in low.spent_s.items()}
    return SumCost(
        at(low.alone_s, high.alone_s),
        at(low.pace_s, high.pace_s),
        at(low.bytes_per_link, high.bytes_per_link),
        spent_s,
    )

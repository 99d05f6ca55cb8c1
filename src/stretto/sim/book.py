"""Prices looked up when they are needed, and only then: most candidates are out of the question."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stretto.comm.algorithms import Algorithm
from stretto.comm.algorithms.table import word_of
from stretto.comm.schedule import Schedule
from stretto.errors import StrettoError
from stretto.sim.bound import LeastPrice, least_in_parts
from stretto.sim.cluster import Cluster
from stretto.sim.price import Price, price
from stretto.sim.serial import serial_steps

AS_GOOD = 1.01
"""Within a hundredth nobody can measure a difference."""
Candidate = tuple[str, int]
"""An algorithm by name, and the number of parts."""


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm, in so many parts, at one size."""

    name: str
    parts: int
    num_bytes: int
    price: Price
    schedule: Schedule

    @property
    def word(self) -> str:
        """Return the algorithm as it is written in a table."""
        return word_of(self.name, self.parts)

    @property
    def about_s(self) -> float:
        """Return the seconds without what rounding left in them: equal costs are a tie."""
        return float(f"{self.price.seconds:.9g}")


@dataclass(frozen=True, slots=True)
class PriceList:
    """Rows by size, the cheapest of each size first."""

    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    """Algorithms that could not be priced, and why."""

    def at(self, num_bytes: int) -> list[Row]:
        """Return the rows of one size, the cheapest first."""
        return [row for row in self.rows if row.num_bytes == num_bytes]


class PriceBook:
    """What the algorithms cost on one cluster; every price is found once."""

    def __init__(self, cluster: Cluster, algorithms: Mapping[str, Algorithm]) -> None:
        self.cluster = cluster
        self.algorithms = algorithms
        self._schedules: dict[Candidate, Schedule] = {}
        self._least: dict[Candidate, LeastPrice] = {}
        self._rows: dict[tuple[Candidate, int], Row] = {}

    def candidates(
        self, parts: Sequence[int], names: Iterable[str] | None = None
    ) -> list[Candidate]:
        """Return every algorithm in every number of parts that changes it, as in the table."""
        found: dict[str, Candidate] = {}
        for name in self.algorithms if names is None else names:
            for count in parts:
                found.setdefault(self.schedule((name, count)).name, (name, count))
        return list(found.values())

    def schedule(self, candidate: Candidate) -> Schedule:
        """Return its schedule on this cluster."""
        if candidate not in self._schedules:
            name, parts = candidate
            self._schedules[candidate] = self.algorithms[name](self.cluster.mesh, parts)
        return self._schedules[candidate]

    def row(self, candidate: Candidate, num_bytes: int) -> Row:
        """Return its price at one size; raise `StrettoError` where it cannot be followed."""
        key = candidate, num_bytes
        if key not in self._rows:
            schedule = self.schedule(candidate)
            priced = price(schedule, num_bytes, self.cluster)
            self._rows[key] = Row(*candidate, num_bytes, priced, schedule)
        return self._rows[key]

    def least_s(self, candidate: Candidate, num_bytes: int) -> float:
        """Return what its price is not below."""
        if candidate not in self._least:
            self._least[candidate] = LeastPrice(self.schedule(candidate), self.cluster)
        alone_s = self._least[candidate].seconds(num_bytes)
        name, parts = candidate
        whole = self._rows.get(((name, 1), num_bytes))
        if whole is None or parts == 1:
            return alone_s
        return max(alone_s, least_in_parts(whole.price, parts, self.cluster))

    def _hoped_s(self, candidate: Candidate, num_bytes: int) -> float:
        """Return what it costs if twice the parts save as much again; they save less each time."""
        name, parts = candidate
        fewer = sorted(p for n, p in self._schedules if n == name and p < parts)
        rows = [self._rows.get(((name, p), num_bytes)) for p in fewer]
        known = [row for row in rows if row is not None][-2:]
        if len(known) < 2:
            return 0.0
        saved_s = known[0].price.seconds - known[1].price.seconds
        doublings = math.log2(known[1].parts / known[0].parts)
        return known[1].price.seconds - saved_s / doublings * math.log2(parts / known[1].parts)

    def every(self, candidates: Sequence[Candidate], sizes: Sequence[int]) -> PriceList:
        """Price all of them, and count their serial messages while they are laid out."""
        rows: list[Row] = []
        left_out: dict[str, str] = {}
        for candidate in candidates:
            found = self._rows_of(candidate, sizes, left_out)
            if found:
                serial_steps(found[0].schedule)
            rows += found
        return _listed(rows, candidates, left_out)

    def near(
        self, candidates: Sequence[Candidate], sizes: Sequence[int], within: float
    ) -> PriceList:
        """Price whatever may cost at most ``within`` times the cheapest of its size.

        The most promising come first, so that the others are seen to be out of the question;
        fewer parts come before more.
        """
        rows: list[Row] = []
        left_out: dict[str, str] = {}
        best = dict.fromkeys(sizes, math.inf)
        for candidate in self._promising(candidates, sizes):
            hopeful = [s for s in sizes if not self._is_out(candidate, s, within * best[s])]
            for row in self._rows_of(candidate, hopeful, left_out):
                best[row.num_bytes] = min(best[row.num_bytes], row.price.seconds)
                rows.append(row)
        near = [row for row in rows if row.price.seconds <= within * best[row.num_bytes]]
        return _listed(near, candidates, left_out)

    def _rows_of(
        self, candidate: Candidate, sizes: Sequence[int], left_out: dict[str, str]
    ) -> list[Row]:
        """Return its rows; none, and the reason noted, where it cannot be followed."""
        try:
            return [self.row(candidate, size) for size in sizes]
        except StrettoError as reason:
            left_out[self.schedule(candidate).name] = str(reason)
            return []

    def _is_out(self, candidate: Candidate, num_bytes: int, limit_s: float) -> bool:
        hoped_s = self._hoped_s(candidate, num_bytes)
        return hoped_s > limit_s or self.least_s(candidate, num_bytes) > limit_s

    def _promising(
        self, candidates: Sequence[Candidate], sizes: Sequence[int]
    ) -> Sequence[Candidate]:
        """Return them, those first that at some size may come nearest to the best."""
        least = {c: [self.least_s(c, size) for size in sizes] for c in candidates}
        lowest = [min(column) for column in zip(*least.values(), strict=True)]

        def behind(candidate: Candidate) -> tuple[int, float]:
            pairs = zip(least[candidate], lowest, strict=True)
            return candidate[1], min(mine / low if low else 1.0 for mine, low in pairs)

        return sorted(candidates, key=behind)


def _listed(
    rows: Iterable[Row], candidates: Sequence[Candidate], left_out: Mapping[str, str]
) -> PriceList:
    """Return ``rows`` in order; what costs the same stands as in ``candidates``."""
    turn = {candidate: index for index, candidate in enumerate(candidates)}
    ordered = sorted(
        rows, key=lambda row: (row.num_bytes, row.about_s, row.parts, turn[row.name, row.parts])
    )
    return PriceList(tuple(ordered), left_out)

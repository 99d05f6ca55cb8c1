"""Price algorithms lazily: most candidates are ruled out by a cheap lower bound.

The lower bound comes from one rank's program. Rounds of a lane run one after another, a round takes
as long as its slowest message, and one core does the work of all messages of a rank. Contention
between ranks is ignored, so a price is never below the bound; a test checks that.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.collectives.algorithm_table import algorithm_text
from stretto.collectives.algorithms import Algorithm
from stretto.collectives.schedule import Action, Schedule, chunk_bounds, rounds
from stretto.errors import StrettoError
from stretto.simulator.closed_forms import serial_steps
from stretto.simulator.cluster import Cluster
from stretto.simulator.message_costs import ELEMENT_BYTES
from stretto.simulator.price import CollectivePrice, price
from stretto.simulator.tasks import Floats, Ints, sum_by_index

_RANK = 0
"""The rank with the most work, where ranks differ."""


class PriceLowerBound:
    """A lower bound on the price of a schedule: the time that rank 0 needs for its messages."""

    def __init__(self, schedule: Schedule, cluster: Cluster) -> None:
        self._cluster, self._native = cluster, schedule.native and schedule.size > 1
        self._num_chunks = schedule.num_chunks
        mesh = cluster.mesh
        local = mesh.ranks_on_host(mesh.host_of(_RANK))
        program_rounds = rounds(schedule, _RANK)
        lanes: dict[int, int] = defaultdict(lambda: len(lanes))
        self._lane = np.array(
            [lanes[one_round.lane] for one_round in program_rounds], dtype=np.int64
        )
        rows = [
            (i, op.start, op.stop, op.peer not in local, op.action is Action.ADD)
            for i, one_round in enumerate(program_rounds)
            for op in one_round.ops
        ]
        table: Ints = np.array(rows, dtype=np.int64).reshape(-1, 5)
        self._round, self._start, self._stop = table[:, 0], table[:, 1], table[:, 2]
        self._between, self._adds = table[:, 3] > 0, table[:, 4] > 0
        sends = [op.action is Action.SEND for one_round in program_rounds for op in one_round.ops]
        self._sends = np.array(sends, dtype=np.bool_)

    def seconds(self, num_bytes: int) -> float:
        """Return the lower bound for a tensor of ``num_bytes``."""
        cluster, cpu = self._cluster, self._cluster.cpu
        size, sent = self._sizes(num_bytes)
        out, inside = cluster.between, cluster.inside
        latency = np.where(self._between, out.latency_s, inside.latency_s)
        wire = size / np.where(self._between, out.bytes_per_s, inside.bytes_per_s)
        per_byte = np.where(self._between, cpu.s_per_byte_between, cpu.s_per_byte_inside)
        core = np.where(sent, (size * per_byte + cpu.s_per_message) / 2, 0.0)
        buffered = np.where(self._between, out.buffered_bytes, inside.buffered_bytes)
        waited = np.where(self._sends, np.maximum(size - buffered, 0.0), size)
        whole = np.maximum(wire, core) * np.divide(waited, size, where=size > 0, out=waited * 0)
        each = np.where(sent, latency + whole, 0.0)
        took = np.zeros(len(self._lane))
        np.maximum.at(took, self._round, each)
        took += sum_by_index(self._round, size * self._adds * cpu.s_per_byte_added, len(took))
        lanes_s = np.bincount(self._lane, weights=took).max(initial=0.0)
        extra_s = cluster.native_latency_s if self._native else 0.0
        return max(float(lanes_s), float(core.sum())) + extra_s

    def _sizes(self, num_bytes: int) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the smallest possible size of every message, and which are not empty."""
        numel, chunks = -(-num_bytes // ELEMENT_BYTES), self._num_chunks
        if numel >= chunks:
            size = (self._stop - self._start).astype(np.float64) * (num_bytes / chunks)
            return size, np.ones(len(size), dtype=np.bool_)
        bounds = np.array(chunk_bounds(numel, chunks), dtype=np.int64)
        return np.zeros(len(self._start)), bounds[self._stop] > bounds[self._start]


def lower_bound_in_parts(whole: CollectivePrice, parts: int, cluster: Cluster) -> float:
    """Return a lower bound on the price in ``parts``, given the price in one part.

    Parts do not reduce the bytes on any link or in the cores, and they add messages.
    """
    pools = 1 if cluster.cpu.pool == "shared" else cluster.mesh.hosts
    more_s = (parts - 1) * whole.num_messages * cluster.cpu.s_per_message
    evenly_s = (whole.core_s + more_s) / (cluster.cpu.cores * pools)
    return max(evenly_s, max(whole.utilization.values()) * whole.seconds)


TIE_FACTOR = 1.01
"""Prices within this factor are a tie: no measurement tells them apart."""
Candidate = tuple[str, int]
"""The name of an algorithm, and the number of parts."""


@dataclass(frozen=True, slots=True)
class AlgorithmPrice:
    """The price of one algorithm in a number of parts at one size."""

    name: str
    parts: int
    num_bytes: int
    price: CollectivePrice
    schedule: Schedule

    @property
    def word(self) -> str:
        """Return the algorithm as it is written in a table."""
        return algorithm_text(self.name, self.parts)

    @property
    def rounded_s(self) -> float:
        """Return the seconds rounded to nine digits, so that equal costs tie."""
        return float(f"{self.price.seconds:.9g}")


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices sorted by size, the cheapest of each size first."""

    rows: tuple[AlgorithmPrice, ...]
    left_out: Mapping[str, str]
    """Algorithms that could not be priced, with the reasons."""

    def at(self, num_bytes: int) -> list[AlgorithmPrice]:
        """Return the prices at one size, the cheapest first."""
        return [row for row in self.rows if row.num_bytes == num_bytes]


class PriceCache:
    """The prices of algorithms on one cluster; each is computed once."""

    def __init__(self, cluster: Cluster, algorithms: Mapping[str, Algorithm]) -> None:
        self.cluster = cluster
        self.algorithms = algorithms
        self._schedules: dict[Candidate, Schedule] = {}
        self._lower_bounds: dict[Candidate, PriceLowerBound] = {}
        self._rows: dict[tuple[Candidate, int], AlgorithmPrice] = {}

    def candidates(
        self, parts: Sequence[int], names: Iterable[str] | None = None
    ) -> list[Candidate]:
        """Return all algorithms, or those of ``names``, in every number of ``parts``.

        Numbers of parts that give the same schedule occur once.
        """
        found: dict[str, Candidate] = {}
        for name in self.algorithms if names is None else names:
            for count in parts:
                found.setdefault(self.schedule((name, count)).name, (name, count))
        return list(found.values())

    def schedule(self, candidate: Candidate) -> Schedule:
        """Return the schedule of ``candidate`` on this cluster."""
        if candidate not in self._schedules:
            name, parts = candidate
            self._schedules[candidate] = self.algorithms[name](self.cluster.mesh, parts)
        return self._schedules[candidate]

    def row(self, candidate: Candidate, num_bytes: int) -> AlgorithmPrice:
        """Return the price of ``candidate`` at one size.

        Raises:
            StrettoError: Its schedule is too large to simulate.
        """
        key = candidate, num_bytes
        if key not in self._rows:
            schedule = self.schedule(candidate)
            priced = price(schedule, num_bytes, self.cluster)
            self._rows[key] = AlgorithmPrice(*candidate, num_bytes, priced, schedule)
        return self._rows[key]

    def lower_bound_s(self, candidate: Candidate, num_bytes: int) -> float:
        """Return a lower bound on the price of ``candidate`` at one size."""
        if candidate not in self._lower_bounds:
            self._lower_bounds[candidate] = PriceLowerBound(self.schedule(candidate), self.cluster)
        bound_s = self._lower_bounds[candidate].seconds(num_bytes)
        name, parts = candidate
        whole = self._rows.get(((name, 1), num_bytes))
        if whole is None or parts == 1:
            return bound_s
        return max(bound_s, lower_bound_in_parts(whole.price, parts, self.cluster))

    def _optimistic_s(self, candidate: Candidate, num_bytes: int) -> float:
        """Return an optimistic price of ``candidate``; 0 without two prices to extrapolate.

        It assumes that each doubling of the parts saves as much as the last known one, while real
        savings shrink.
        """
        name, parts = candidate
        fewer = sorted(p for n, p in self._schedules if n == name and p < parts)
        rows = [self._rows.get(((name, p), num_bytes)) for p in fewer]
        known_rows = [row for row in rows if row is not None][-2:]
        if len(known_rows) < 2:
            return 0.0
        saved_s = known_rows[0].price.seconds - known_rows[1].price.seconds
        doublings = math.log2(known_rows[1].parts / known_rows[0].parts)
        return known_rows[1].price.seconds - saved_s / doublings * math.log2(
            parts / known_rows[1].parts
        )

    def all_prices(self, candidates: Sequence[Candidate], sizes: Sequence[int]) -> PriceList:
        """Price all ``candidates`` at all ``sizes``.

        Serial steps are counted at once, because the expanded schedule is still cached.
        """
        rows: list[AlgorithmPrice] = []
        left_out: dict[str, str] = {}
        for candidate in candidates:
            found = self._rows_of(candidate, sizes, left_out)
            if found:
                serial_steps(found[0].schedule)
            rows += found
        return _sorted_price_list(rows, candidates, left_out)

    def near_best(
        self, candidates: Sequence[Candidate], sizes: Sequence[int], within: float
    ) -> PriceList:
        """Return the prices that are at most ``within`` times the cheapest of their size.

        The most promising candidates are priced first, so that the bounds rule out most others.
        Fewer parts come before more.
        """
        rows: list[AlgorithmPrice] = []
        left_out: dict[str, str] = {}
        best = dict.fromkeys(sizes, math.inf)
        for candidate in self._most_promising_first(candidates, sizes):
            kept_sizes = [
                s for s in sizes if not self._is_ruled_out(candidate, s, within * best[s])
            ]
            for row in self._rows_of(candidate, kept_sizes, left_out):
                best[row.num_bytes] = min(best[row.num_bytes], row.price.seconds)
                rows.append(row)
        near_best = [row for row in rows if row.price.seconds <= within * best[row.num_bytes]]
        return _sorted_price_list(near_best, candidates, left_out)

    def _rows_of(
        self, candidate: Candidate, sizes: Sequence[int], left_out: dict[str, str]
    ) -> list[AlgorithmPrice]:
        """Return the prices of ``candidate``; none, with a reason in ``left_out``, on an error."""
        try:
            return [self.row(candidate, size) for size in sizes]
        except StrettoError as reason:
            left_out[self.schedule(candidate).name] = str(reason)
            return []

    def _is_ruled_out(self, candidate: Candidate, num_bytes: int, limit_s: float) -> bool:
        optimistic_s = self._optimistic_s(candidate, num_bytes)
        return optimistic_s > limit_s or self.lower_bound_s(candidate, num_bytes) > limit_s

    def _most_promising_first(
        self, candidates: Sequence[Candidate], sizes: Sequence[int]
    ) -> Sequence[Candidate]:
        """Sort candidates by parts, then by their lower bound relative to the best bound."""
        lower_bounds = {c: [self.lower_bound_s(c, size) for size in sizes] for c in candidates}
        best_bounds = [min(column) for column in zip(*lower_bounds.values(), strict=True)]

        def sort_key(candidate: Candidate) -> tuple[int, float]:
            pairs = zip(lower_bounds[candidate], best_bounds, strict=True)
            return candidate[1], min(
                bound / best_bound if best_bound else 1.0 for bound, best_bound in pairs
            )

        return sorted(candidates, key=sort_key)


def _sorted_price_list(
    rows: Iterable[AlgorithmPrice], candidates: Sequence[Candidate], left_out: Mapping[str, str]
) -> PriceList:
    """Return ``rows`` sorted; equal costs keep the order of ``candidates``."""
    position = {candidate: index for index, candidate in enumerate(candidates)}
    ordered = sorted(
        rows,
        key=lambda row: (row.num_bytes, row.rounded_s, row.parts, position[row.name, row.parts]),
    )
    return PriceList(tuple(ordered), left_out)

"""All algorithms at all sizes on one cluster, and which one to take from which size on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.comm.algorithms import ALLREDUCE, Algorithm
from stretto.comm.schedule import Schedule
from stretto.errors import ConfigError, StrettoError
from stretto.sim.cluster import Cluster
from stretto.sim.price import Price, price
from stretto.sim.serial import serial_steps
from stretto.units import format_bytes, format_s

PARTS = (1, 2, 4, 8)
_PLAIN = "ring"
"""What the winner is compared with: everybody knows it."""
_AS_GOOD = 1.01
"""Within a hundredth nobody can measure a difference: take what is simpler, or the same again."""


@dataclass(frozen=True, slots=True)
class Row:
    """One algorithm, in so many parts, at one size."""

    name: str
    parts: int
    num_bytes: int
    price: Price
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class PriceList:
    """Rows by size, the cheapest of each size first."""

    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    """Algorithms that could not be priced, and why."""

    def at(self, num_bytes: int) -> list[Row]:
        """Return the rows of one size, the cheapest first."""
        return [row for row in self.rows if row.num_bytes == num_bytes]


@dataclass(frozen=True, slots=True)
class Choice:
    """What to take for messages of ``from_bytes`` and more, until the next row."""

    from_bytes: int
    name: str
    parts: int
    seconds: float
    """At ``from_bytes``."""
    reason: str


def price_all(
    cluster: Cluster,
    sizes: Sequence[int],
    parts: Sequence[int] = PARTS,
    algorithms: Mapping[str, Algorithm] = ALLREDUCE,
) -> PriceList:
    """Price every algorithm, in every number of parts that changes it, at every size."""
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for name, algorithm in algorithms.items():
        made: set[str] = set()
        for count in parts:
            schedule = algorithm(cluster.mesh, count)
            if schedule.name in made:
                continue
            made.add(schedule.name)
            try:
                rows += [
                    Row(name, count, size, price(schedule, size, cluster), schedule)
                    for size in sizes
                ]
            except StrettoError as reason:
                left_out[schedule.name] = str(reason)
    ordered = sorted(rows, key=lambda row: (row.num_bytes, row.price.seconds, row.parts))
    return PriceList(tuple(ordered), left_out)


def choose(
    cluster: Cluster,
    sizes: Sequence[int],
    parts: Sequence[int] = PARTS,
    algorithms: Mapping[str, Algorithm] = ALLREDUCE,
) -> tuple[Choice, ...]:
    """Return the cheapest algorithm for each of ``sizes``, as rows of a table, with reasons.

    A row begins at the first size at which its algorithm wins.
    """
    if not sizes:
        raise ConfigError("no message sizes to choose for; give some, such as 1KB,1MB,32MB")
    prices = price_all(cluster, sorted(set(sizes)), parts, algorithms)
    if not prices.rows:
        why = "; ".join(prices.left_out.values())
        raise StrettoError(f"none of the algorithms could be priced: {why}")
    choices: list[Choice] = []
    before: tuple[str, int] | None = None
    for size in sorted(set(sizes)):
        best = _best(prices.at(size), before)
        if (best.name, best.parts) != before:
            reason = _reason(best, prices.at(size), cluster)
            choices.append(Choice(size, best.name, best.parts, best.price.seconds, reason))
        before = best.name, best.parts
    return tuple(choices)


def _best(rows: Sequence[Row], before: tuple[str, int] | None) -> Row:
    good = [row for row in rows if row.price.seconds <= _AS_GOOD * rows[0].price.seconds]
    again = [row for row in good if (row.name, row.parts) == before]
    return again[0] if again else min(good, key=lambda row: (row.parts, row.price.seconds))


def _reason(best: Row, rows: Sequence[Row], cluster: Cluster) -> str:
    """Say in words what saves the winner most against the ring, or against who is next."""
    others = [row for row in rows if row.name != best.name]
    if not others:
        return "the only one there is"
    plain = [row for row in others if row.name == _PLAIN and row.parts == 1]
    other = plain[0] if plain else others[0]
    saved = [*_savings(best, other, cluster), *_overlap(best, rows)]
    seconds, words = max(saved)
    if seconds > 0:
        return words
    return (
        f"{format_s(best.price.seconds)} instead of {format_s(other.price.seconds)} with "
        f"{other.name}"
    )


def _savings(best: Row, other: Row, cluster: Cluster) -> list[tuple[float, str]]:
    """Return what it saves in messages, bytes and CPU, in seconds, with the words for it."""
    mine, theirs = serial_steps(best.schedule), serial_steps(other.schedule)
    carried, instead = best.price.bytes_per_link, other.price.bytes_per_link
    pools = 1 if cluster.cpu.pool == "shared" else cluster.mesh.hosts
    cores = cluster.cpu.cores * pools
    return [
        (
            (theirs - mine) * cluster.between.latency_s,
            f"{mine} serial messages instead of {theirs} with {other.name}",
        ),
        (
            (instead - carried) / cluster.between.bytes_per_s,
            f"each link carries {format_bytes(carried)} instead of {format_bytes(instead)} with "
            f"{other.name}",
        ),
        (
            (other.price.core_s - best.price.core_s) / cores,
            f"{format_s(best.price.core_s)} of CPU instead of {format_s(other.price.core_s)} with "
            f"{other.name}",
        ),
    ]


def _overlap(best: Row, rows: Sequence[Row]) -> list[tuple[float, str]]:
    """Return what it saves that the parts are in different phases at once."""
    whole = [row for row in rows if row.name == best.name and row.parts == 1]
    if best.parts == 1 or not whole:
        return []
    seconds = whole[0].price.seconds
    words = f"{best.parts} parts overlap: {format_s(best.price.seconds)} instead of "
    return [(seconds - best.price.seconds, words + f"{format_s(seconds)} in one")]

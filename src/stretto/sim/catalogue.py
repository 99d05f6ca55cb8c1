"""All algorithms at all sizes on one cluster, and which one to take from which size on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.comm.algorithms import ALLREDUCE, Algorithm
from stretto.errors import ConfigError, StrettoError
from stretto.sim.book import AS_GOOD, PriceBook, PriceList, Row
from stretto.sim.cluster import Cluster
from stretto.sim.serial import serial_steps
from stretto.units import format_bytes, format_s

PARTS = (1, 2, 4, 8)
_PLAIN = "ring"
"""What the winner is compared with: everybody knows it."""


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
    book = PriceBook(cluster, algorithms)
    return book.every(book.candidates(parts), sizes)


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
    book = PriceBook(cluster, algorithms)
    prices = book.near(book.candidates(parts), sizes, AS_GOOD)
    return tuple(explained(row, book) for row in picked(prices))


def picked(prices: PriceList) -> list[Row]:
    """Return the rows to take: each from its size on, until the next."""
    if not prices.rows:
        why = "; ".join(prices.left_out.values())
        raise StrettoError(f"none of the algorithms could be priced: {why}")
    found: list[Row] = []
    for size in sorted({row.num_bytes for row in prices.rows}):
        best = _best(prices.at(size), found[-1] if found else None)
        if not found or (best.name, best.parts) != (found[-1].name, found[-1].parts):
            found.append(best)
    return found


def _best(rows: Sequence[Row], before: Row | None) -> Row:
    """Of what is as good as the cheapest, take the same again, or what is simpler."""
    good = [row for row in rows if row.price.seconds <= AS_GOOD * rows[0].price.seconds]
    again = [row for row in good if before and (row.name, row.parts) == (before.name, before.parts)]
    return again[0] if again else min(good, key=lambda row: (row.parts, row.about_s))


def explained(row: Row, book: PriceBook) -> Choice:
    """Return a row to take with the reason: what it saves most against the ring, or the next."""
    return Choice(row.num_bytes, row.name, row.parts, row.price.seconds, _reason(row, book))


def _reason(best: Row, book: PriceBook) -> str:
    others = [name for name in book.algorithms if name != best.name]
    if not others:
        return "the only one there is"
    names = [_PLAIN] if _PLAIN in others else others
    prices = book.near([(name, 1) for name in names], [best.num_bytes], within=1.0)
    if not prices.rows:
        return f"{format_s(best.price.seconds)}, and no other has a price"
    other = prices.rows[0]
    saved = [*_savings(best, other, book.cluster), *_overlap(best, book)]
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


def _overlap(best: Row, book: PriceBook) -> list[tuple[float, str]]:
    """Return what it saves that the parts are in different phases at once."""
    if best.parts == 1:
        return []
    seconds = book.row((best.name, 1), best.num_bytes).price.seconds
    words = f"{best.parts} parts overlap: {format_s(best.price.seconds)} instead of "
    return [(seconds - best.price.seconds, words + f"{format_s(seconds)} in one")]

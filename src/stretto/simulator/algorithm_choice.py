"""Choose all-reduce algorithms by message size, and the bucket size, from simulated prices.

Training uses `choose_back_to_back_table`: the algorithms with the least simulated price for
messages that follow one another, as the buckets of a step do. `choose_table` is for single
messages: it returns the measured table of a cluster where there is one, else the cheapest
algorithms by price.
`choose_bucket_bytes` returns the bucket size for a table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import AlgorithmChoice, AlgorithmTable, parse_table
from stretto.collectives.algorithms import ALLREDUCE, Algorithm
from stretto.collectives.schedule import Schedule, pipeline_tensor
from stretto.errors import ConfigError, StrettoError
from stretto.simulator.closed_forms import serial_steps
from stretto.simulator.cluster import Cluster, preset
from stretto.simulator.price import price
from stretto.simulator.price_cache import TIE_FACTOR, AlgorithmPrice, PriceCache, PriceList
from stretto.units import format_bytes, format_s

DEFAULT_PARTS = (1, 2, 4, 8)
"""The numbers of pipelined parts that are tried."""
_BASELINE = "ring"
"""The algorithm that reasons compare the cheapest one with, because it is the best known."""


@dataclass(frozen=True, slots=True)
class AlgorithmRecommendation:
    """The algorithm for messages of ``from_bytes`` and more, up to the next recommendation."""

    from_bytes: int
    name: str
    parts: int
    seconds: float
    """The price at ``from_bytes``."""
    reason: str
    """Why this algorithm is the cheapest, in words."""


def price_all_algorithms(
    cluster: Cluster,
    sizes: Sequence[int],
    parts: Sequence[int] = DEFAULT_PARTS,
    algorithms: Mapping[str, Algorithm] = ALLREDUCE,
) -> PriceList:
    """Price every algorithm at every size, in every number of parts that changes its schedule."""
    price_cache = PriceCache(cluster, algorithms)
    return price_cache.all_prices(price_cache.candidates(parts), sizes)


def recommend_algorithms(
    cluster: Cluster,
    sizes: Sequence[int],
    parts: Sequence[int] = DEFAULT_PARTS,
    algorithms: Mapping[str, Algorithm] = ALLREDUCE,
) -> tuple[AlgorithmRecommendation, ...]:
    """Return the cheapest algorithms for ``sizes`` with reasons, one for each range of sizes.

    Each range begins at the first of ``sizes`` at which its algorithm is the cheapest.

    Raises:
        ConfigError: There are no sizes.
        StrettoError: None of the algorithms can be priced.
    """
    if not sizes:
        raise ConfigError("no message sizes to choose for; give some, such as 1KB,1MB,32MB")
    price_cache = PriceCache(cluster, algorithms)
    prices = price_cache.near_best(price_cache.candidates(parts), sizes, TIE_FACTOR)
    return tuple(explain_choice(row, price_cache) for row in pick_cheapest(prices))


def pick_cheapest(prices: PriceList) -> list[AlgorithmPrice]:
    """Return the cheapest algorithms; each applies from its size up to that of the next."""
    if not prices.rows:
        why = "; ".join(prices.left_out.values())
        raise StrettoError(f"none of the algorithms could be priced: {why}")
    found: list[AlgorithmPrice] = []
    for size in sorted({row.num_bytes for row in prices.rows}):
        best = _pick_best(prices.at(size), found[-1] if found else None)
        if not found or (best.name, best.parts) != (found[-1].name, found[-1].parts):
            found.append(best)
    return found


def _pick_best(rows: Sequence[AlgorithmPrice], previous: AlgorithmPrice | None) -> AlgorithmPrice:
    """Among the near-cheapest, return the previous algorithm, else the one with fewest parts."""
    good = [row for row in rows if row.price.seconds <= TIE_FACTOR * rows[0].price.seconds]
    same_as_before = [
        row for row in good if previous and (row.name, row.parts) == (previous.name, previous.parts)
    ]
    return (
        same_as_before[0]
        if same_as_before
        else min(good, key=lambda row: (row.parts, row.rounded_s))
    )


def explain_choice(row: AlgorithmPrice, price_cache: PriceCache) -> AlgorithmRecommendation:
    """Return ``row`` as a recommendation with its reason: its largest saving against the ring.

    Where the row is the ring, or there is no ring, the next cheapest algorithm is compared.
    """
    return AlgorithmRecommendation(
        row.num_bytes, row.name, row.parts, row.price.seconds, _reason(row, price_cache)
    )


def _reason(best: AlgorithmPrice, price_cache: PriceCache) -> str:
    others = [name for name in price_cache.algorithms if name != best.name]
    if not others:
        return "the only algorithm there is"
    names = [_BASELINE] if _BASELINE in others else others
    prices = price_cache.near_best([(name, 1) for name in names], [best.num_bytes], within=1.0)
    if not prices.rows:
        return f"{format_s(best.price.seconds)}, and no other can be priced"
    other = prices.rows[0]
    saved = [*_savings(best, other, price_cache.cluster), *_overlap_savings(best, price_cache)]
    seconds, text = max(saved)
    if seconds > 0:
        return text
    return (
        f"{format_s(best.price.seconds)} instead of {format_s(other.price.seconds)} with "
        f"{other.name}"
    )


def _savings(
    best: AlgorithmPrice, other: AlgorithmPrice, cluster: Cluster
) -> list[tuple[float, str]]:
    """Return (seconds saved, explanation) for serial messages, link bytes and CPU."""
    best_steps, other_steps = serial_steps(best.schedule), serial_steps(other.schedule)
    best_bytes, other_bytes = best.price.bytes_per_link, other.price.bytes_per_link
    pools = 1 if cluster.cpu.pool == "shared" else cluster.mesh.hosts
    cores = cluster.cpu.cores * pools
    return [
        (
            (other_steps - best_steps) * cluster.between.latency_s,
            f"{best_steps} serial messages instead of {other_steps} with {other.name}",
        ),
        (
            (other_bytes - best_bytes) / cluster.between.bytes_per_s,
            f"each link carries {format_bytes(best_bytes)} instead of {format_bytes(other_bytes)} "
            f"with {other.name}",
        ),
        (
            (other.price.core_s - best.price.core_s) / cores,
            f"{format_s(best.price.core_s)} of CPU instead of {format_s(other.price.core_s)} with "
            f"{other.name}",
        ),
    ]


def _overlap_savings(best: AlgorithmPrice, price_cache: PriceCache) -> list[tuple[float, str]]:
    """Return (seconds saved, explanation) for the overlap of parts in different phases."""
    if best.parts == 1:
        return []
    seconds = price_cache.row((best.name, 1), best.num_bytes).price.seconds
    text = f"{best.parts} parts overlap: {format_s(best.price.seconds)} instead of "
    return [(seconds - best.price.seconds, text + f"{format_s(seconds)} in one")]


SMALL_SIZES = (1_000, 4_000, 16_000, 64_000, 256_000)
LARGE_SIZES = (1_000_000, 4_000_000, 16_000_000, 64_000_000)
TABLE_SIZES = SMALL_SIZES + LARGE_SIZES
"""The message sizes of a table: from a few gradients to a whole model."""
_NEAR_BEST = 1.5
"""Algorithms up to this factor above the cheapest as a whole are also tried in parts."""
LARGE_MESSAGE_PARTS = (1, 2, 4, 8, 16)
_MAX_MESSAGES = 100_000
"""Limit on simulated messages in parts. Every rank makes its own table, so it must be quick."""
NATIVE = "native"
"""The back end's own all-reduce."""
BACK_TO_BACK = 8
"""Number of consecutive messages that are priced together."""
DEFAULT_PRESET = "ethernet 10gbit"
"""The assumed links between hosts without a cluster description."""
LAB_PRESET = "box 400mbit"
_GOODPUT = 0.95
"""Share of a shaped link's rate that TCP reaches."""


def assumed_cluster(mesh: Mesh, link_bits_per_s: int | None) -> Cluster:
    """Return the cluster to assume without measurements.

    ``link_bits_per_s`` is the shaped rate of a lab's links; None outside a lab.
    """
    if link_bits_per_s is None:
        return preset(DEFAULT_PRESET).with_mesh(mesh)
    lab = preset(LAB_PRESET).with_mesh(mesh)
    link = lab.between.model_copy(update={"bytes_per_s": _GOODPUT * link_bits_per_s / 8})
    return lab.model_copy(update={"between": link})


def default_table(mesh: Mesh, *, on_gpu: bool) -> AlgorithmTable:
    """Return the algorithms for ``mesh`` without a cluster description.

    GPUs use the back end's own all-reduce, because NCCL knows their links.
    """
    return choose_table(None, Mesh((1,)) if on_gpu else mesh)


def choose_table(cluster: Cluster | None, mesh: Mesh, *, native: bool = True) -> AlgorithmTable:
    """Return the algorithm table for ``mesh``: the measured one of ``cluster``, else by price.

    ``native`` says whether the back end's own all-reduce may be used. Ranks of one host without a
    cluster description use it, else the ring.
    """
    if cluster is None and mesh.hosts == 1:
        return AlgorithmTable((AlgorithmChoice(0, NATIVE if native else "ring"),))
    if cluster is not None and mesh.shape in cluster.tables:
        table = parse_table(cluster.tables[mesh.shape])
        if native or all(choice.name != NATIVE for choice in table.choices):
            return table
    cluster_on_mesh = (cluster or preset(DEFAULT_PRESET)).with_mesh(mesh)
    algorithms = {name: make for name, make in ALLREDUCE.items() if native or name != NATIVE}
    return table_of(recommend_by_size(cluster_on_mesh, algorithms))


def choose_back_to_back_table(
    cluster: Cluster | None, mesh: Mesh, *, native: bool = True
) -> AlgorithmTable:
    """Return the algorithm table for many consecutive messages, such as the buckets of a step.

    Here the interval between messages matters, not the duration of one. Where phases have their
    own lanes, the last phase of one message overlaps the first of the next. So several messages in
    a row are priced together, each in one part.
    """
    if cluster is None and mesh.hosts == 1:
        return choose_table(None, mesh, native=native)
    cluster_on_mesh = (cluster or preset(DEFAULT_PRESET)).with_mesh(mesh)
    back_to_back = {
        name: partial(_back_to_back, make)
        for name, make in ALLREDUCE.items()
        if native or name != NATIVE
    }
    price_cache = PriceCache(cluster_on_mesh, back_to_back)
    rows = pick_cheapest(
        price_cache.near_best(
            price_cache.candidates((1,)), [BACK_TO_BACK * size for size in TABLE_SIZES], TIE_FACTOR
        )
    )
    choices = [AlgorithmChoice(row.num_bytes // BACK_TO_BACK, row.name) for row in rows]
    return AlgorithmTable((replace(choices[0], min_bytes=0), *choices[1:]))


def choose_isolated_table(
    cluster: Cluster, sizes: Sequence[int], *, native: bool = True
) -> AlgorithmTable:
    """Return the table of the cheapest algorithms for single messages of ``sizes`` in one part.

    For so many ranks that simulating consecutive messages, or parts, takes minutes.
    """
    algorithms = {name: make for name, make in ALLREDUCE.items() if native or name != NATIVE}
    price_cache = PriceCache(cluster, algorithms)
    rows = pick_cheapest(price_cache.near_best(price_cache.candidates((1,)), sizes, TIE_FACTOR))
    choices = [AlgorithmChoice(row.num_bytes, row.name) for row in rows]
    return AlgorithmTable((replace(choices[0], min_bytes=0), *choices[1:]))


def _back_to_back(make: Algorithm, mesh: Mesh, _parts: int) -> Schedule:
    return pipeline_tensor(make(mesh, 1), BACK_TO_BACK)


def recommend_by_size(
    cluster: Cluster, algorithms: Mapping[str, Algorithm] = ALLREDUCE
) -> list[AlgorithmRecommendation]:
    """Return the cheapest algorithms by size with reasons; large messages are tried in parts.

    Only algorithms that are near the best in one part, and not too large, are tried in parts.
    """
    price_cache = PriceCache(cluster, algorithms)
    whole = price_cache.candidates((1,))
    small = pick_cheapest(price_cache.near_best(whole, SMALL_SIZES, TIE_FACTOR))
    near_best = {
        row.name: _num_simulated_messages(row)
        for row in price_cache.near_best(whole, LARGE_SIZES, _NEAR_BEST).rows
    }
    candidates_in_parts = [
        (name, parts)
        for name, parts in price_cache.candidates(
            LARGE_MESSAGE_PARTS, [name for name in algorithms if name in near_best]
        )
        if parts == 1 or near_best[name] * parts <= _MAX_MESSAGES
    ]
    large = pick_cheapest(price_cache.near_best(candidates_in_parts, LARGE_SIZES, TIE_FACTOR))
    is_same_algorithm = (small[-1].name, small[-1].parts) == (large[0].name, large[0].parts)
    return [explain_choice(row, price_cache) for row in (*small, *large[is_same_algorithm:])]


def _num_simulated_messages(row: AlgorithmPrice) -> int:
    """Return the number of simulated messages: those of the representative ranks."""
    return row.price.num_messages // row.price.ranks_represented


def table_of(rows: Sequence[AlgorithmRecommendation]) -> AlgorithmTable:
    """Return ``rows`` as a table whose first row applies from zero bytes on."""
    choices = [AlgorithmChoice(row.from_bytes, row.name, row.parts) for row in rows]
    return AlgorithmTable((replace(choices[0], min_bytes=0), *choices[1:]))


# --- bucket size ---

TARGET_EFFICIENCY = 0.98
"""Share of the rate that a bucket has to reach.

It is high because messages also take cores from backward, which a price of communication alone
does not count.
"""
_SMALL_BYTES, _LARGE_BYTES = 16_000_000, 64_000_000
"""Two sizes between which a price is linear in the number of bytes."""
_MIN_BUCKET_BYTES, _MAX_BUCKET_BYTES = 64_000, 64_000_000


def min_efficient_bytes(
    latency_s: float, bytes_per_s: float, efficiency: float = TARGET_EFFICIENCY
) -> float:
    """Return the smallest message, in bytes, that reaches the share ``efficiency`` of the rate.

    A message of n bytes takes latency + n / rate, so n = e / (1 - e) x latency x rate.
    """
    return efficiency / (1 - efficiency) * latency_s * bytes_per_s


def choose_bucket_bytes(cluster: Cluster, table: AlgorithmTable) -> int:
    """Return the bucket size B* for ``table`` on ``cluster``, in bytes, rounded to kilobytes.

    Larger buckets are sent later and gain little.
    """
    small_s, large_s = (_price_s(cluster, table, size) for size in (_SMALL_BYTES, _LARGE_BYTES))
    bytes_per_s = (_LARGE_BYTES - _SMALL_BYTES) / (large_s - small_s)
    latency_s = max(0.0, small_s - _SMALL_BYTES / bytes_per_s)
    bucket_bytes = round(min_efficient_bytes(latency_s, bytes_per_s), -3)
    return int(min(max(bucket_bytes, _MIN_BUCKET_BYTES), _MAX_BUCKET_BYTES))


def _price_s(cluster: Cluster, table: AlgorithmTable, num_bytes: int) -> float:
    schedule = table.pick(_LARGE_BYTES).schedule(cluster.mesh)
    return price(schedule, num_bytes, cluster).seconds

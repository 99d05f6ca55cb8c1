"""From measurements on the ranks at hand to a cluster's description, and tables for their shape."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from stretto.cluster.world import Mesh, World
from stretto.comm.algorithms import native
from stretto.comm.algorithms.table import AlgorithmTable, Choice, parse_word
from stretto.comm.channel import Channel
from stretto.comm.connect import connect
from stretto.comm.spread import spread_text
from stretto.measure.collectives import Trial, time_collective
from stretto.measure.links import Cost, Links, measure_links
from stretto.sim.choosing import SIZES, described
from stretto.sim.cluster import Cluster, Cpu, Transport
from stretto.sim.price import price
from stretto.study.collectives import candidates
from stretto.units import format_bytes, format_s

_AS_GOOD = 1.03
"""Within so much of the best, the algorithm of the size before is kept: shorter tables."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the table: what won at a size, and against what."""

    num_bytes: int
    word: str
    seconds: float
    runner_up: str
    runner_up_s: float

    @property
    def reason(self) -> str:
        """Return why it is in the table."""
        return (
            f"{format_s(self.seconds)} at {format_bytes(self.num_bytes)}; next best "
            f"{self.runner_up} with {format_s(self.runner_up_s)}"
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found, and where the table comes from."""

    cluster: Cluster
    rows: tuple[Measured, ...]


@dataclass(frozen=True, slots=True)
class How:
    """How a calibration is made."""

    runs: int = 5
    """Interleaved repetitions of each algorithm."""
    table: bool = True
    """Whether algorithms are timed too."""
    device: str = "cpu"


def calibrate(
    world: World, known: Cluster | None, how: How, say: Callable[[str], None]
) -> Calibration:
    """Measure links and algorithms; all ranks together. ``known`` is added to, not forgotten."""
    torch.set_num_threads(world.threads)
    channel = connect(world, device=how.device)
    links = measure_links(channel, say, how.device)
    assumed = known or described(channel.mesh, world.link_bits_per_s)
    cluster = of_rank_0(describe(links, channel.mesh, assumed), channel)
    rows = _measure_table(channel, cluster, how, say) if how.table else ()
    channel.close()
    if rows:
        tables = {**cluster.tables, channel.mesh.shape: str(table_of(rows))}
        cluster = cluster.model_copy(update={"tables": tables})
    return Calibration(cluster, rows)


def of_rank_0(cluster: Cluster, channel: Channel) -> Cluster:
    """Return rank 0's description on every rank: what is timed next must be the same everywhere.

    Ranks may know different things before: not every disk is shared, and clocks differ.
    """
    return Cluster.model_validate_json(spread_text(cluster.model_dump_json(), channel))


def describe(links: Links, mesh: Mesh, known: Cluster) -> Cluster:
    """Return ``known`` with everything in it that ``links`` tell: what was not met is kept."""
    between = _transport(links.between) if links.between else known.between
    inside = _transport(links.inside) if links.inside else known.inside
    cost = links.between or links.inside
    cpu = Cpu(
        pool=_pool(links, mesh, known),
        cores=links.cores,
        s_per_byte_between=(
            links.between.core_s_per_byte if links.between else known.cpu.s_per_byte_between
        ),
        s_per_byte_inside=(
            links.inside.core_s_per_byte if links.inside else known.cpu.s_per_byte_inside
        ),
        s_per_message=cost.core_s_per_message if cost else known.cpu.s_per_message,
        s_per_byte_added=links.core_s_per_byte_added,
    )
    told = {
        "ranks_per_host": mesh.ranks_per_host,
        "between": between,
        "inside": inside,
        "cpu": cpu,
        "native_latency_s": 0.0,
    }
    cluster = known.model_copy(update=told)
    messages_s = price(native(mesh.size), 8, cluster).seconds
    extra_s = max(0.0, links.native_s - messages_s)
    return cluster.model_copy(update={"native_latency_s": extra_s})


def _pool(links: Links, mesh: Mesh, known: Cluster) -> Literal["host", "shared"]:
    """Return whose the cores are; one host alone cannot tell."""
    if mesh.hosts == 1:
        return known.cpu.pool
    return "shared" if links.machines == 1 else "host"


def _transport(cost: Cost) -> Transport:
    # What a message costs the cores is charged by itself.
    latency_s = max(0.0, cost.latency_s - cost.core_s_per_message)
    return Transport(
        latency_s=latency_s,
        bytes_per_s=cost.bytes_per_s,
        buffered_bytes=cost.buffered_bytes,
        queued_bytes=cost.queued_bytes,
    )


def _measure_table(
    channel: Channel, cluster: Cluster, how: How, say: Callable[[str], None]
) -> tuple[Measured, ...]:
    """Time what the prices put first, at every size; keep what wins."""
    rows: list[Measured] = []
    for size in SIZES:
        trial = Trial("allreduce", size, device=how.device)
        words = candidates(trial, cluster)
        if rows and rows[-1].word not in words:
            words.append(rows[-1].word)
        say(f"{format_bytes(size)}: {', '.join(words)}")
        times = time_collective(trial, {word: word for word in words}, channel, runs=how.runs)
        medians = {word: statistics.median(values) for word, values in times.items()}
        rows.append(pick(size, medians, rows[-1].word if rows else None))
    return tuple(rows)


def pick(num_bytes: int, medians: dict[str, float], before: str | None) -> Measured:
    """Return the fastest, or who won at the size before if it is as good."""
    order = sorted(medians, key=medians.__getitem__)
    best = order[0]
    if before is not None and medians.get(before, float("inf")) <= _AS_GOOD * medians[best]:
        best = before
    runner_up = next((word for word in order if word != best), best)
    return Measured(num_bytes, best, medians[best], runner_up, medians[runner_up])


def table_of(rows: tuple[Measured, ...]) -> AlgorithmTable:
    """Return the measured rows as a table: each begins halfway, in ratio, from the size before."""
    choices: list[Choice] = []
    last = 0
    for row in rows:
        name, parts = parse_word(row.word)
        if not choices or (choices[-1].name, choices[-1].parts) != (name, parts):
            least = round((last * row.num_bytes) ** 0.5, -3) if last >= 10_000 else row.num_bytes
            choices.append(Choice(int(least) if choices else 0, name, parts))
        last = row.num_bytes
    return AlgorithmTable(tuple(choices))

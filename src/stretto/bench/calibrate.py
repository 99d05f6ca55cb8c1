"""Measure links and algorithms on the ranks of this run, and describe them as a `Cluster`."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from stretto.bench.collectives import CollectiveTrial, likely_algorithms, time_collective
from stretto.cluster.world import Mesh, World
from stretto.collectives.algorithm_table import AlgorithmChoice, AlgorithmTable, parse_algorithm
from stretto.collectives.algorithms import native
from stretto.comm.broadcast import broadcast_text
from stretto.comm.connect import connect
from stretto.comm.transport import Transport
from stretto.profiler.links import LinkMeasurements, MeasuredLinkCost, measure_links
from stretto.simulator.algorithm_choice import TABLE_SIZES, assumed_cluster
from stretto.simulator.cluster import Cluster, Cpu, LinkCosts
from stretto.simulator.price import price
from stretto.units import format_bytes, format_s

_TIE_TOLERANCE = 1.03
"""Within this factor of the best, the previous size's algorithm is kept: shorter tables."""


@dataclass(frozen=True, slots=True)
class FastestAlgorithm:
    """The fastest algorithm at one size, with the runner-up."""

    num_bytes: int
    word: str
    seconds: float
    runner_up: str
    runner_up_s: float

    @property
    def reason(self) -> str:
        """Return the measurement that put it in the table, in words."""
        return (
            f"{format_s(self.seconds)} at {format_bytes(self.num_bytes)}; next best "
            f"{self.runner_up} with {format_s(self.runner_up_s)}"
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """The description of the cluster, with the measurements behind its table."""

    cluster: Cluster
    rows: tuple[FastestAlgorithm, ...]


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """The options of `stretto calibrate`."""

    runs: int = 5
    """Interleaved repetitions of each algorithm."""
    table: bool = True
    """Whether algorithms are timed as well."""
    device: str = "cpu"


def calibrate(
    world: World,
    previous: Cluster | None,
    options: CalibrationOptions,
    log_line: Callable[[str], None],
) -> Calibration:
    """Measure links and algorithms; all ranks call this together.

    Values of ``previous`` that cannot be measured here are kept, and so are its other tables.
    """
    torch.set_num_threads(world.threads)
    transport = connect(world, device=options.device)
    links = measure_links(transport, log_line, options.device)
    assumed = previous or assumed_cluster(transport.mesh, world.link_bits_per_s)
    cluster = broadcast_cluster(describe_cluster(links, transport.mesh, assumed), transport)
    rows = _measure_table(transport, cluster, options, log_line) if options.table else ()
    transport.close()
    if rows:
        tables = {**cluster.tables, transport.mesh.shape: str(build_table(rows))}
        cluster = cluster.model_copy(update={"tables": tables})
    return Calibration(cluster, rows)


def broadcast_cluster(cluster: Cluster, transport: Transport) -> Cluster:
    """Return rank 0's description on every rank, so that all time the same algorithms next.

    Ranks may differ before, because not every disk is shared, and measured times differ.
    """
    return Cluster.model_validate_json(broadcast_text(cluster.model_dump_json(), transport))


def describe_cluster(links: LinkMeasurements, mesh: Mesh, previous: Cluster) -> Cluster:
    """Return ``previous`` updated with the measurements; values without one are kept."""
    between = _link_costs(links.between) if links.between else previous.between
    inside = _link_costs(links.inside) if links.inside else previous.inside
    cost = links.between or links.inside
    cpu = Cpu(
        pool=_core_pool(links, mesh, previous),
        cores=links.cores,
        s_per_byte_between=(
            links.between.core_s_per_byte if links.between else previous.cpu.s_per_byte_between
        ),
        s_per_byte_inside=(
            links.inside.core_s_per_byte if links.inside else previous.cpu.s_per_byte_inside
        ),
        s_per_message=cost.core_s_per_message if cost else previous.cpu.s_per_message,
        s_per_byte_added=links.core_s_per_byte_added,
    )
    updates = {
        "ranks_per_host": mesh.ranks_per_host,
        "between": between,
        "inside": inside,
        "cpu": cpu,
        "native_latency_s": 0.0,
    }
    cluster = previous.model_copy(update=updates)
    messages_s = price(native(mesh.size), 8, cluster).seconds
    extra_s = max(0.0, links.native_s - messages_s)
    return cluster.model_copy(update={"native_latency_s": extra_s})


def _core_pool(links: LinkMeasurements, mesh: Mesh, previous: Cluster) -> Literal["host", "shared"]:
    """Return whether hosts share cores; a single host cannot tell, so it keeps the old value."""
    if mesh.hosts == 1:
        return previous.cpu.pool
    return "shared" if links.machines == 1 else "host"


def _link_costs(cost: MeasuredLinkCost) -> LinkCosts:
    # The simulator adds the CPU time of a message itself.
    latency_s = max(0.0, cost.latency_s - cost.core_s_per_message)
    return LinkCosts(
        latency_s=latency_s,
        bytes_per_s=cost.bytes_per_s,
        buffered_bytes=cost.buffered_bytes,
        queued_bytes=cost.queued_bytes,
    )


def _measure_table(
    transport: Transport,
    cluster: Cluster,
    options: CalibrationOptions,
    log_line: Callable[[str], None],
) -> tuple[FastestAlgorithm, ...]:
    """Time the algorithms with the best prices at every size; return the fastest ones."""
    rows: list[FastestAlgorithm] = []
    for size in TABLE_SIZES:
        trial = CollectiveTrial("allreduce", size, device=options.device)
        labels = likely_algorithms(trial, cluster)
        if rows and rows[-1].word not in labels:
            labels.append(rows[-1].word)
        log_line(f"{format_bytes(size)}: {', '.join(labels)}")
        algorithms = {label: label for label in labels}
        times = time_collective(trial, algorithms, transport, runs=options.runs)
        medians = {label: statistics.median(values) for label, values in times.items()}
        rows.append(pick_fastest(size, medians, rows[-1].word if rows else None))
    return tuple(rows)


def pick_fastest(
    num_bytes: int, medians: dict[str, float], previous_winner: str | None
) -> FastestAlgorithm:
    """Return the fastest algorithm, or ``previous_winner`` if it is as fast up to a tolerance."""
    order = sorted(medians, key=medians.__getitem__)
    best = order[0]
    if (
        previous_winner is not None
        and medians.get(previous_winner, float("inf")) <= _TIE_TOLERANCE * medians[best]
    ):
        best = previous_winner
    runner_up = next((label for label in order if label != best), best)
    return FastestAlgorithm(num_bytes, best, medians[best], runner_up, medians[runner_up])


def build_table(rows: tuple[FastestAlgorithm, ...]) -> AlgorithmTable:
    """Return the measured rows as a table.

    Each row begins at the geometric mean of its size and the one before.
    """
    choices: list[AlgorithmChoice] = []
    last = 0
    for row in rows:
        name, parts = parse_algorithm(row.word)
        if not choices or (choices[-1].name, choices[-1].parts) != (name, parts):
            min_bytes = (
                round((last * row.num_bytes) ** 0.5, -3) if last >= 10_000 else row.num_bytes
            )
            choices.append(AlgorithmChoice(int(min_bytes) if choices else 0, name, parts))
        last = row.num_bytes
    return AlgorithmTable(tuple(choices))

"""Study the step time of several strategies on several numbers of hosts, predicted and measured.

One combination of a strategy and a number of hosts is a cell. Finished cells are kept in a record,
so an interrupted study continues where it stopped.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.cluster.world import Mesh
from stretto.errors import StrettoError
from stretto.planner.profile import read_profile
from stretto.profiler.interleaved_timing import STEPS_PER_TIMING
from stretto.run import RunConfig, flat_settings
from stretto.simulator.algorithm_choice import assumed_cluster
from stretto.simulator.cluster import Cluster
from stretto.strategies import ADPSGDConfig, GossipConfig, LocalConfig
from stretto.studies.node_cells import (
    MeasurementJob,
    MeasureStep,
    NodesCell,
    NodesRecord,
    check_same_settings,
)
from stretto.studies.priced_run import CostSource, StrategyVariant
from stretto.studies.strategy_prices import Predictor, with_samples_per_rank
from stretto.units import format_s

Say = Callable[[str], None]
_ASYNC_STEPS_FACTOR = 6
"""Factor on the number of timed steps for strategies whose ranks do not wait for each other."""


@dataclass(frozen=True, slots=True)
class NodesStudy:
    """The cells to study, and how to measure them."""

    run: Path
    """The run file."""
    variants: Sequence[StrategyVariant]
    hosts: Sequence[int]
    """The numbers of hosts."""
    ranks_per_host: int
    rate: str
    """The rate of each link of the lab, such as "1gbit"."""
    runs: int
    """Repetitions of each measurement."""
    samples: int | None = None
    """Samples per rank and step; None: the run's batch divided by the number of ranks."""

    def meshes(self) -> Iterator[Mesh]:
        """Yield a mesh for each number of hosts."""
        return (Mesh((self.ranks_per_host,) * hosts) for hosts in self.hosts)


def lab_cluster(bits_per_s: int, cores: int) -> Cluster:
    """Return the cluster description of a lab on this machine: shaped links and shared cores."""
    box = assumed_cluster(Mesh((1,)), bits_per_s)
    return box.model_copy(update={"cpu": box.cpu.model_copy(update={"cores": float(cores)})})


def study_settings(study: NodesStudy, source: CostSource) -> dict[str, object]:
    """Return the settings that all cells share. A record with others belongs to another study."""
    settings = flat_settings(study.variants[0].config)
    # Output folders and logging settings do not change the time of a step.
    ignored_prefixes = ("strategy.", "run.name", "run.folder", "run.trackers", "run.trace")
    kept = {key: value for key, value in settings.items() if not key.startswith(ignored_prefixes)}
    digest = None
    if source.profile is not None:
        text = read_profile(source.profile).model_dump_json()
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {
        **kept,
        "--ranks-per-host": study.ranks_per_host,
        "--rate": study.rate,
        "--samples": study.samples,
        "--profile": digest,
        "--device": source.device,
        "cluster": source.cluster.model_dump(mode="json", exclude={"ranks_per_host"}),
    }


def run_nodes_study(
    study: NodesStudy,
    predictor: Predictor,
    record: NodesRecord,
    measure: MeasureStep | None,
    log_line: Say,
) -> list[NodesCell]:
    """Predict, and perhaps measure, the cells that the record lacks; return all cells of the study.

    Args:
        study: The cells.
        predictor: Predicts step times.
        record: Finished cells; new ones are added.
        measure: Measures a cell; None to predict only.
        log_line: Called with a line of progress for each cell.

    Raises:
        ConfigError: The record has one of these cells with other settings.
        LaunchError: A measurement failed; cells before it are in the record.
    """
    cases = [(mesh, variant) for mesh in study.meshes() for variant in study.variants]
    for mesh, variant in cases:
        check_same_settings(record, _empty_cell(variant, mesh), study.runs if measure else None)
    cells: list[NodesCell] = []
    for number, (mesh, variant) in enumerate(cases, start=1):
        progress = f"cell {number} of {len(cases)}: {variant.spec} on {mesh.hosts} hosts"
        cell = record.find_finished(variant.spec, mesh.hosts, timed=measure is not None)
        if cell is not None:
            log_line(f"{progress}: in the record")
        else:
            log_line(f"{progress} ...")
            cell = _fill_cell(study, variant, mesh, predictor, measure)
            record.add(cell)
            log_line(f"{progress}: {_describe_cell(cell)}")
        cells.append(cell)
    return cells


def _empty_cell(variant: StrategyVariant, mesh: Mesh) -> NodesCell:
    return NodesCell(variant.spec, mesh.hosts, variant.config.strategy.model_dump(mode="json"))


def _fill_cell(
    study: NodesStudy,
    variant: StrategyVariant,
    mesh: Mesh,
    predictor: Predictor,
    measure: MeasureStep | None,
) -> NodesCell:
    cell = _empty_cell(variant, mesh)
    try:
        predicted = predictor.price(variant.config, mesh)
        cell = replace(cell, predicted=predicted.facts())
    except StrettoError as reason:
        return replace(cell, left_out=str(reason))
    if measure is None:
        return cell
    timed = measure(_measurement_job(study, variant, mesh))
    given = predictor.price(variant.config, mesh, timed.compute_s / predicted.compute_s)
    return replace(cell, timed=timed, given=given.facts())


def _measurement_job(study: NodesStudy, variant: StrategyVariant, mesh: Mesh) -> MeasurementJob:
    batch = with_samples_per_rank(variant.config, study.samples, mesh.size).train.batch
    return MeasurementJob(
        run=study.run,
        overrides=(*variant.overrides, f"train.batch={batch}"),
        hosts=mesh.hosts,
        ranks_per_host=study.ranks_per_host,
        rate=study.rate,
        runs=study.runs,
        steps=steps_timed_as_one(variant.config),
    )


def steps_timed_as_one(config: RunConfig) -> int:
    """Return how many steps are timed together: at least `STEPS_PER_TIMING`, in whole periods.

    Ranks of AD-PSGD do not wait for each other, and a timing ends with the slowest rank. More steps
    are timed there, so that random delays average out.
    """
    strategy = config.strategy
    if isinstance(strategy, ADPSGDConfig):
        return _ASYNC_STEPS_FACTOR * STEPS_PER_TIMING
    every = strategy.every if isinstance(strategy, GossipConfig | LocalConfig) else 1
    return every * -(-STEPS_PER_TIMING // every)


def _describe_cell(cell: NodesCell) -> str:
    if cell.predicted is None:
        return f"left out: {cell.left_out}"
    predicted = f"{format_s(cell.predicted['step_s'])} a step predicted"
    return (
        predicted if cell.timed is None else f"{predicted}, {format_s(cell.timed.step_s)} measured"
    )


HEADERS = ("hosts", "strategy", "predicted", "efficiency", "bound", "held up by")
TIMED_HEADERS = ("measured", "efficiency", "off", "predicted, computing as measured", "off")


def cells_table(cells: Sequence[NodesCell]) -> list[tuple[str, ...]]:
    """Return a row of headers and a row of text for each cell that has a prediction."""
    timed = any(cell.timed is not None for cell in cells)
    head = HEADERS + TIMED_HEADERS * timed
    return [head, *(_cell_row(cell, timed=timed) for cell in cells if cell.predicted is not None)]


def _cell_row(cell: NodesCell, *, timed: bool) -> tuple[str, ...]:
    assert cell.predicted is not None
    prediction = cell.predicted
    row = (
        str(cell.hosts),
        cell.strategy,
        format_s(prediction["step_s"]),
        f"{prediction['efficiency']:.1%}",
        format_s(prediction["bound_s"]),
        str(prediction["held_up_by"]),
    )
    if not timed:
        return row
    if cell.timed is None or cell.given is None:
        return (*row, *[""] * len(TIMED_HEADERS))
    measured_s = cell.timed.step_s
    return (
        *row,
        format_s(measured_s),
        f"{cell.timed.efficiency:.1%}",
        _relative_error(prediction, measured_s),
        format_s(cell.given["step_s"]),
        _relative_error(cell.given, measured_s),
    )


def _relative_error(prediction: Any, measured_s: float) -> str:  # noqa: ANN401 - a record's own
    return f"{prediction['step_s'] / measured_s - 1:+.1%}"

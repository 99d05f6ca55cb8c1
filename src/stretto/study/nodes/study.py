"""A study of nodes: for every strategy and number of hosts what a step takes, cell by cell."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.cluster.world import Mesh
from stretto.errors import StrettoError
from stretto.measure.interleave import STEPS
from stretto.plan.profile import read_profile
from stretto.run import RunConfig, flat_settings
from stretto.sim.choosing import described
from stretto.sim.cluster import Cluster
from stretto.strategy import ADPSGDConfig, GossipConfig, LocalConfig
from stretto.study.nodes.lab import Measure, Order
from stretto.study.nodes.record import Cell, Record, check_same
from stretto.study.predicted.prices import Predictor, with_samples
from stretto.study.predicted.subject import Source
from stretto.study.predicted.variants import Variant
from stretto.units import format_s

Say = Callable[[str], None]
_APART = 6
"""How many times as long ranks are timed that wait for nobody's step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked."""

    run: Path
    variants: Sequence[Variant]
    hosts: Sequence[int]
    ranks_per_host: int
    rate: str
    """Of each link."""
    runs: int
    """Repetitions of a measurement."""
    samples: int | None = None
    """Of each rank; the run's batch is shared where None."""

    def meshes(self) -> Iterator[Mesh]:
        """Yield hosts and ranks of every cell."""
        return (Mesh((self.ranks_per_host,) * hosts) for hosts in self.hosts)


def lab_cluster(bits_per_s: int, cores: int) -> Cluster:
    """Return what a lab of this machine is taken to be: its links as shaped, its cores shared."""
    box = described(Mesh((1,)), bits_per_s)
    return box.model_copy(update={"cpu": box.cpu.model_copy(update={"cores": float(cores)})})


def study_settings(plan: Plan, source: Source) -> dict[str, object]:
    """Return what all cells have in common: a record with other settings is of another study."""
    settings = flat_settings(plan.variants[0].config)
    # Neither where a run would write nor how often it would look changes a step.
    free = ("strategy.", "run.name", "run.folder", "run.trackers", "run.trace")
    kept = {key: value for key, value in settings.items() if not key.startswith(free)}
    digest = None
    if source.profile is not None:
        text = read_profile(source.profile).model_dump_json()
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {
        **kept,
        "--ranks-per-host": plan.ranks_per_host,
        "--rate": plan.rate,
        "--samples": plan.samples,
        "--profile": digest,
        "--device": source.device,
        "cluster": source.cluster.model_dump(mode="json", exclude={"ranks_per_host"}),
    }


def carry_out(
    plan: Plan, predictor: Predictor, record: Record, measure: Measure | None, say: Say
) -> list[Cell]:
    """Fill every cell that the record has not, and return all that were asked for.

    Raises:
        ConfigError: The record has one of other settings.
        LaunchError: A measurement failed; cells before it are in the record.
    """
    wanted = [(mesh, variant) for mesh in plan.meshes() for variant in plan.variants]
    for mesh, variant in wanted:
        check_same(record, _blank(variant, mesh), plan.runs if measure else None)
    cells: list[Cell] = []
    for number, (mesh, variant) in enumerate(wanted, start=1):
        place = f"cell {number} of {len(wanted)}: {variant.word} on {mesh.hosts} hosts"
        cell = record.finished(variant.word, mesh.hosts, timed=measure is not None)
        if cell is not None:
            say(f"{place}: in the record")
        else:
            say(f"{place} ...")
            cell = _filled(plan, variant, mesh, predictor, measure)
            record.add(cell)
            say(f"{place}: {_told(cell)}")
        cells.append(cell)
    return cells


def _blank(variant: Variant, mesh: Mesh) -> Cell:
    return Cell(variant.word, mesh.hosts, variant.config.strategy.model_dump(mode="json"))


def _filled(
    plan: Plan, variant: Variant, mesh: Mesh, predictor: Predictor, measure: Measure | None
) -> Cell:
    cell = _blank(variant, mesh)
    try:
        predicted = predictor.price(variant.config, mesh)
        cell = replace(cell, predicted=predicted.facts())
    except StrettoError as reason:
        return replace(cell, left_out=str(reason))
    if measure is None:
        return cell
    timed = measure(_order(plan, variant, mesh))
    given = predictor.price(variant.config, mesh, timed.compute_s / predicted.compute_s)
    return replace(cell, timed=timed, given=given.facts())


def _order(plan: Plan, variant: Variant, mesh: Mesh) -> Order:
    batch = with_samples(variant.config, plan.samples, mesh.size).train.batch
    return Order(
        run=plan.run,
        overrides=(*variant.overrides, f"train.batch={batch}"),
        hosts=mesh.hosts,
        ranks_per_host=plan.ranks_per_host,
        rate=plan.rate,
        runs=plan.runs,
        steps=timed_steps(variant.config),
    )


def timed_steps(config: RunConfig) -> int:
    """Return how many steps are timed as one: whole periods, as long as others at least.

    Where ranks do not wait for each other's steps, so many that luck counts for little: what is
    timed ends with the slowest of them.
    """
    strategy = config.strategy
    if isinstance(strategy, ADPSGDConfig):
        return _APART * STEPS
    every = strategy.every if isinstance(strategy, GossipConfig | LocalConfig) else 1
    return every * -(-STEPS // every)


def _told(cell: Cell) -> str:
    if cell.predicted is None:
        return f"left out: {cell.left_out}"
    predicted = f"{format_s(cell.predicted['step_s'])} a step predicted"
    return (
        predicted if cell.timed is None else f"{predicted}, {format_s(cell.timed.step_s)} measured"
    )


HEADERS = ("hosts", "strategy", "predicted", "efficiency", "bound", "held up by")
TIMED_HEADERS = ("measured", "efficiency", "off", "predicted, computing as measured", "off")


def table(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Return the cells as rows of words, under a row of headers."""
    timed = any(cell.timed is not None for cell in cells)
    head = HEADERS + TIMED_HEADERS * timed
    return [head, *(_row(cell, timed=timed) for cell in cells if cell.predicted is not None)]


def _row(cell: Cell, *, timed: bool) -> tuple[str, ...]:
    assert cell.predicted is not None
    told = cell.predicted
    row = (
        str(cell.hosts),
        cell.strategy,
        format_s(told["step_s"]),
        f"{told['efficiency']:.1%}",
        format_s(told["bound_s"]),
        str(told["held_up_by"]),
    )
    if not timed:
        return row
    if cell.timed is None or cell.given is None:
        return (*row, *[""] * len(TIMED_HEADERS))
    took = cell.timed.step_s
    return (
        *row,
        format_s(took),
        f"{cell.timed.efficiency:.1%}",
        _off(told, took),
        format_s(cell.given["step_s"]),
        _off(cell.given, took),
    )


def _off(told: Any, took_s: float) -> str:  # noqa: ANN401 - a record's own
    return f"{told['step_s'] / took_s - 1:+.1%}"

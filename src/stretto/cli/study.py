"""``stretto study``: compare strategies as workers, batches or hosts grow.

``nodes`` compares step times, ``workers`` and ``batch`` compare accuracy.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from stretto.errors import ConfigError
from stretto.units import parse_fraction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.studies.nodes import NodesStudy
    from stretto.studies.priced_run import CostSource
    from stretto.studies.scaling_sweep import GridCell, RunResult, StudyPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LabFlags:
    """The hosts and their links."""

    hosts: str
    """Numbers of hosts, as 2,4,6,8."""
    ranks_per_host: int = 1
    """Ranks that share a host and its link."""
    rate: str = "200mbit"
    """Rate of each link in each direction."""
    samples: int | None = None
    """Samples of each rank in a step; when left out, ranks share the run's batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionFlags:
    """Measured or estimated costs for the predictions."""

    profile: Path | None = None
    """A file of stretto profile with the model's costs; estimated when left out."""
    cluster: str | None = None
    """Links and cores to predict for, instead of those of a lab: a file of stretto calibrate, or a
    name."""
    device: str = "cpu"
    """Device of the estimate: cpu, h200, or operations and bytes per second as 3e14,2e12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementFlags:
    """Measurements and the record file."""

    measure: bool = False
    """Time the steps as well, in a lab of as many hosts (needs root)."""
    runs: int = 5
    """Repetitions of each timing; the median counts."""
    out: Path = Path("nodes.json")
    """Record file, written after every cell, so that an interrupted study can continue."""
    json_: bool = False
    """Print one object per cell on standard output."""


def nodes(
    run: Path,
    /,
    *overrides: str,
    strategies: str = "",
    lab: Annotated[LabFlags, Parameter(name="*")],
    prediction: Annotated[PredictionFlags, Parameter(name="*")] = PredictionFlags(),  # noqa: B008 - frozen
    measurement: Annotated[MeasurementFlags, Parameter(name="*")] = MeasurementFlags(),  # noqa: B008 - frozen
) -> int:
    """Predict step times by number of hosts, and with --measure time them in a lab.

    Example: stretto study nodes run.toml --hosts 2,4 --strategies allreduce,crossover:delay=1

    Parameters
    ----------
    run
        The run file (TOML), or the name of a recipe.
    overrides
        Settings that override the file, as table.key=value.
    strategies
        Strategies to compare, with settings after a colon: allreduce,crossover:delay=1; or all.
        The run's own when left out.
    """
    from stretto.cluster.detect import detect_world
    from stretto.studies.node_cells import measure_in_lab, open_record
    from stretto.studies.nodes import cells_table, run_nodes_study, study_settings
    from stretto.studies.plan_comparison import check_parent_folder
    from stretto.studies.strategy_prices import Predictor

    # model.target may name a module beside the run file or in the working directory.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    check_parent_folder(measurement.out, "--out")
    study = _nodes_study(run, overrides, strategies, lab, measurement.runs)
    if measurement.measure and min(study.hosts) * study.ranks_per_host < 2:
        raise ConfigError(f"--hosts {lab.hosts} --measure: one rank alone has nobody to talk to")
    source = _cost_source(prediction, lab)
    record = open_record(measurement.out, study_settings(study, source))
    predictor = Predictor(source, detect_world(), lab.samples)
    measure = measure_in_lab if measurement.measure else None
    cells = run_nodes_study(study, predictor, record, measure, _say)
    if measurement.json_:
        for cell in cells:
            print(json.dumps(asdict(cell)))
    else:
        _print_table(cells_table(cells))
    _say(f"the record is {measurement.out}")
    return 0


def _nodes_study(
    run: Path, overrides: "Sequence[str]", strategies: str, lab: LabFlags, runs: int
) -> "NodesStudy":
    from stretto.studies.nodes import NodesStudy
    from stretto.studies.priced_run import find_variants

    for name, count in (("--ranks-per-host", lab.ranks_per_host), ("--runs", runs)):
        if count < 1:
            raise ConfigError(f"{name} {count}: expected at least 1")
    if lab.samples is not None and lab.samples < 1:
        raise ConfigError(f"--samples {lab.samples}: expected at least 1")
    counts = [count.strip() for count in lab.hosts.split(",")]
    if not all(count.isdecimal() and int(count) for count in counts):
        raise ConfigError(f"--hosts {lab.hosts}: expected numbers of hosts, as 2,4,6,8")
    hosts = [int(count) for count in counts]
    variants = find_variants(run, overrides, strategies)
    return NodesStudy(run, variants, hosts, lab.ranks_per_host, lab.rate, runs, lab.samples)


def _cost_source(prediction: PredictionFlags, lab: LabFlags) -> "CostSource":
    import os

    from stretto.planner.profile import load_cluster_or_preset
    from stretto.studies.nodes import lab_cluster
    from stretto.studies.priced_run import CostSource
    from stretto.units import parse_bits_per_s

    rate = parse_bits_per_s(lab.rate)
    if not rate:
        raise ConfigError(f"--rate {lab.rate}: nothing could be sent")
    if prediction.cluster is not None:
        cluster, name = load_cluster_or_preset(prediction.cluster), prediction.cluster
    else:
        cluster, name = lab_cluster(rate, len(os.sched_getaffinity(0))), f"a lab at {lab.rate}"
    return CostSource(cluster, name, prediction.profile, prediction.device)


def _print_table(rows: "Sequence[tuple[str, ...]]") -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = zip(row, widths, strict=True)
        print("  ".join(f"{cell:<{width}}" for cell, width in pairs).rstrip())


def _say(line: str) -> None:
    print(f"stretto study: {line}", file=sys.stderr, flush=True)


# --- stretto study workers, stretto study batch ---


@dataclass(frozen=True, kw_only=True)
class StudyFlags:
    """Settings of all studies of accuracy."""

    strategies: str = "allreduce,sgp,crossover"
    """Strategies to compare, with settings after a colon: crossover:groups=8:delay=1."""
    seeds: int = 3
    """Runs of each point at its best learning rate."""
    factors: str = "0.5,1,2"
    """Multiples of the run's learning rate to try at each point; the sweep continues outwards while
    the best one is at its edge."""
    jobs: int = 1
    """Concurrent runs, each in a process."""
    threads: int = 1
    """CPU threads of each run."""
    lost: str = "0"
    """Share of gossip messages that are lost, as 1%; synchronous strategies lose none."""
    device: str = "cpu"
    """cpu, or cuda, where the step of all workers is recorded once as a CUDA graph."""
    out: Path = Path("study")
    """The folder of the study, where an interrupted one continues; study.html is the report."""
    json: bool = False
    """Print one object per point on standard output."""


DEFAULT_STUDY_FLAGS = StudyFlags()
StudyFlagsParameter = Annotated[StudyFlags, Parameter(name="*")]


def workers(
    run: Path,
    /,
    *overrides: str,
    workers: str = "8,16,32,64",
    flags: StudyFlagsParameter = DEFAULT_STUDY_FLAGS,
) -> int:
    """Measure accuracy by number of workers at a fixed batch, with virtual workers.

    Example: stretto study workers examples/shapes.toml --workers 4,16 --out study

    Parameters
    ----------
    run
        A run file, or a recipe's name.
    overrides
        Settings of the run, as table.key=value.
    workers
        Numbers of workers.
    """
    from stretto.recipes import load_run

    batch = load_run(run, overrides).config.train.batch
    points = [(count, batch) for count in _counts("--workers", workers)]
    return _run_study("workers", run, overrides, points, flags)


def batch(
    run: Path,
    /,
    *overrides: str,
    batches: str = "1024,2048,4096,8192,16384",
    workers: int = 8,
    flags: StudyFlagsParameter = DEFAULT_STUDY_FLAGS,
) -> int:
    """Measure accuracy by batch at a fixed number of workers, with virtual workers.

    Example: stretto study batch examples/shapes.toml --batches 64,256 --workers 4 --out study

    Parameters
    ----------
    run
        A run file, or a recipe's name.
    overrides
        Settings of the run, as table.key=value.
    batches
        Global batch sizes: samples of a step over all workers.
    workers
        Number of workers.
    """
    points = [(workers, count) for count in _counts("--batches", batches)]
    return _run_study("batch", run, overrides, points, flags)


def _run_study(
    axis: str,
    run: Path,
    overrides: "Sequence[str]",
    points: "Sequence[tuple[int, int]]",
    flags: StudyFlags,
) -> int:
    from stretto.studies.scaling_page import write_study_page
    from stretto.studies.scaling_runs import (
        ResultsStore,
        RunTemplate,
        ScalingStudy,
        run_scaling_study,
    )
    from stretto.studies.scaling_sweep import FactorSweep, StudyPoint

    for name in ("seeds", "jobs", "threads"):
        if getattr(flags, name) < 1:
            raise ConfigError(f"--{name} {getattr(flags, name)}: expected at least 1")
    specs = [spec.strip() for spec in flags.strategies.split(",")]
    study_points = tuple(StudyPoint(spec, count, size) for spec in specs for count, size in points)
    lost = parse_fraction(flags.lost)
    template = RunTemplate(str(run), tuple(overrides), flags.threads, lost, flags.device)
    planned = ScalingStudy(
        template, study_points, FactorSweep(_factors(flags.factors), flags.seeds)
    )
    planned.check()
    store = ResultsStore(flags.out, planned.common_settings())
    page = flags.out / "study.html"
    try:
        run_scaling_study(planned, store, jobs=flags.jobs, log_line=_say)
    finally:
        write_study_page(
            page, f"{run.stem}: accuracy against {axis}", axis, study_points, store.done
        )
    _print_summaries(study_points, store.done, as_json=flags.json)
    _say(f"the report is {page}")
    return 0


def _counts(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{name} {text}: expected numbers as 8,16,32")
    return [int(part) for part in parts]


def _factors(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or not 0 < found[0] <= found[-1] < float("inf"):
        raise ConfigError(f"--factors {text}: expected numbers above 0, as 0.5,1,2")
    return found


def _print_summaries(
    points: "Sequence[StudyPoint]", done: "Mapping[GridCell, RunResult]", *, as_json: bool
) -> None:
    from stretto.studies.scaling_page import HEADERS, summary_record, table_rows
    from stretto.studies.scaling_sweep import summarise

    summaries = [one for point in points if (one := summarise(point, done)) is not None]
    if as_json:
        for one in summaries:
            print(json.dumps(summary_record(one)))
        return
    rows = [list(HEADERS), *table_rows(summaries)]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    for name, *figures in rows:
        padded = (figure.rjust(width) for figure, width in zip(figures, others, strict=True))
        print("  ".join([name.ljust(first), *padded]))


study = App(name="study", help="Compare strategies as workers, batches or hosts grow.")
for command in (workers, batch, nodes):
    study.command(command)

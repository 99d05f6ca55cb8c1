"""``stretto plan``: plan sharding and the timing of messages under a memory limit."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from stretto.planner.explain import PlanExplanation
    from stretto.planner.planner import PlanningResult
    from stretto.planner.profile import Profile
    from stretto.run import RunConfig
    from stretto.studies.plan_comparison import PlanRequest

_MAX_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSourceFlags:
    """The measured or estimated costs that a plan is made from."""

    profile: Path | None = None
    """A file of stretto profile."""
    cluster: str | None = None
    """Without a profile: a file of stretto calibrate, or a name such as "gpu nodes 100gbit"; the
    model is then estimated, not measured."""
    device: str = "cpu"
    """Device of the estimate: cpu, h200, or operations and bytes per second as 3e14,2e12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """The output files and formats."""

    out: Path = Path("plan.json")
    """File to write the plan to, for strategy.plan."""
    page: Path | None = None
    """File to write an HTML page to, with timeline, memory curve and table."""
    json_: bool = False
    """Print one object on standard output."""


def plan(
    run: Path,
    /,
    *overrides: str,
    memory: str,
    source: Annotated[ModelSourceFlags, Parameter(name="*")] = ModelSourceFlags(),  # noqa: B008 - frozen
    what_if: tuple[str, ...] = (),
    pareto: int = 0,
    output: Annotated[OutputFlags, Parameter(name="*")] = OutputFlags(),  # noqa: B008 - frozen
) -> int:
    """Plan RUN's model so that no rank exceeds --memory; print what the plan costs, and why.

    Example: stretto plan run.toml --profile profile.json --memory 6GiB --what-if rate=10gbit

    Parameters
    ----------
    run
        The run file (TOML), or the name of a recipe.
    overrides
        Settings that override the file, as table.key=value.
    memory
        Memory limit of a rank: parameters, gradients, optimizer state, activations, workspace.
    what_if
        Compare with a plan for other conditions: memory=8GiB,rate=10gbit,latency=50us,ranks=16;
        may be repeated.
    pareto
        Also plan for this many memory limits, from the least possible to all that is useful.
    """
    from stretto.planner.explain import explain
    from stretto.recipes import load_run
    from stretto.studies.plan_comparison import (
        PlanRequest,
        allowed_choices,
        apply_changes,
        describe_comparison,
    )
    from stretto.studies.plan_comparison import pareto as plan_for_limits
    from stretto.telemetry.sinks import write_atomically
    from stretto.units import parse_bytes

    # model.target may name a module beside the run file or in the working directory.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    _check_output_folders(output)
    config = load_run(run, overrides).config
    memory_limit = parse_bytes(memory)
    request = PlanRequest(_load_profile(config, source), memory_limit, allowed_choices(config))
    others = [(text, apply_changes(request, text)) for text in what_if]
    planned = request.plan()
    explanation = explain(planned, request.profile)
    write_atomically(output.out, planned.plan.to_json() + "\n")
    compared = [describe_comparison(text, planned, other.plan()) for text, other in others]
    points = plan_for_limits(request, pareto) if pareto else []
    if output.page is not None:
        _write_page(output.page, run, request, planned, explanation, points)
    if output.json_:
        _print_json(planned, explanation, compared, points)
    else:
        _print(request, planned, explanation, compared, points)
    _say(f"wrote {output.out}" + (f" and {output.page}" if output.page else ""))
    return 0


def _check_output_folders(output: OutputFlags) -> None:
    from stretto.studies.plan_comparison import check_parent_folder

    for path, flag in ((output.out, "--out"), (output.page, "--page")):
        if path is not None:
            check_parent_folder(path, flag)


def _load_profile(config: "RunConfig", source: ModelSourceFlags) -> "Profile":
    from stretto.bench.profile_run import ProfileOptions, profile_run
    from stretto.cluster.detect import detect_world
    from stretto.errors import ConfigError
    from stretto.planner.profile import read_profile

    if source.profile is not None:
        return read_profile(source.profile)
    if source.cluster is None:
        raise ConfigError(
            "a plan needs to know what the model and the links take: --profile FILE, made by "
            "stretto profile; or --cluster, a file of stretto calibrate or a name, for an estimate"
        )
    options = ProfileOptions(device=source.device, cluster=source.cluster, estimate=True)
    return profile_run(config, detect_world(), options, _say)


def _write_page(
    path: Path,
    run: Path,
    request: "PlanRequest",
    planned: "PlanningResult",
    explanation: "PlanExplanation",
    points: list[tuple[int, float]],
) -> None:
    from stretto.planner.explain import HEADERS
    from stretto.report.plan_page import PlanPage, write_plan_page

    page = PlanPage(
        title=f"A plan for {run.name}",
        summary_line=f"{explanation.summary_line}. {explanation.memory}.",
        profile=request.profile,
        plan=planned.plan,
        memory_limit=planned.memory_limit,
        headers=HEADERS,
        rows=explanation.rows,
        pareto=points,
    )
    write_plan_page(path, page)


def _print(
    request: "PlanRequest",
    planned: "PlanningResult",
    explanation: "PlanExplanation",
    compared: list[str],
    points: list[tuple[int, float]],
) -> None:
    from stretto.planner.explain import HEADERS
    from stretto.units import format_bytes, format_s

    rows = [
        HEADERS,
        *(tuple(_shorten(cell) for cell in row) for row in explanation.rows[:_MAX_ROWS]),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADERS))]
    for row in rows:
        pairs = zip(row, widths, strict=True)
        print("  ".join(f"{cell:<{width}}" for cell, width in pairs).rstrip())
    if len(explanation.rows) > _MAX_ROWS:
        print(f"and {len(explanation.rows) - _MAX_ROWS} more")
    print(explanation.summary_line)
    print(explanation.memory)
    print(f"profile: {request.profile.source or 'of unknown origin'}")
    for line in compared:
        print(f"if {line}")
    for num_bytes, step_s in points:
        print(f"{format_bytes(num_bytes):>12} {format_s(step_s):>10} a step")


def _print_json(
    planned: "PlanningResult",
    explanation: "PlanExplanation",
    compared: list[str],
    points: list[tuple[int, float]],
) -> None:
    from stretto.planner.explain import HEADERS, ms_per_gib
    from stretto.renamed import with_old_keys

    found = {
        "step_s": planned.step_s,
        "bound_s": planned.bound_s,
        "greedy_s": planned.greedy_s,
        "peak_bytes": planned.peak_bytes,
        "memory_limit": planned.memory_limit,
        "ms_per_gib": ms_per_gib(planned),
        "from": planned.how,
        "units": [dict(zip(HEADERS, row, strict=True)) for row in explanation.rows],
        "what_if": compared,
        "pareto": points,
    }
    print(json.dumps(with_old_keys(found)))


def _shorten(cell: str) -> str:
    return cell if len(cell) <= 100 else f"{cell[:48]} .. {cell[-48:]}"


def _say(line: str) -> None:
    print(f"stretto plan: {line}", file=sys.stderr)

"""``stretto plan``: how each unit is kept and when messages begin, under a memory limit."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from stretto.plan.explain import Explained
    from stretto.plan.planner import Planned
    from stretto.plan.profile import Profile
    from stretto.run import RunConfig
    from stretto.study.planning import Setting

_MOST_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is known of the model and the links."""

    profile: Path | None = None
    """Made by stretto profile."""
    cluster: str | None = None
    """Without a profile: a file of stretto calibrate, or a name such as "gpu nodes 100gbit"; the
    model is then estimated, not measured."""
    device: str = "cpu"
    """What an estimate is for: cpu, h200, or operations and bytes a second as 3e14,2e12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is told, and where."""

    out: Path = Path("plan.json")
    """The plan, for strategy.plan."""
    page: Path | None = None
    """Time-line, memory curve and table as a page for a browser."""
    json_: bool = False
    """One object on standard output."""


def plan(
    run: Path,
    /,
    *overrides: str,
    memory: str,
    source: Annotated[Source, Parameter(name="*")] = Source(),  # noqa: B008 - frozen
    what_if: tuple[str, ...] = (),
    pareto: int = 0,
    output: Annotated[Output, Parameter(name="*")] = Output(),  # noqa: B008 - frozen
) -> int:
    """Plan RUN's model so that no rank keeps more than --memory; say what it costs, and why.

    Example: stretto plan run.toml --profile profile.json --memory 6GiB --what-if rate=10gbit

    Parameters
    ----------
    run
        The run file (TOML), or the name of a recipe.
    overrides
        Settings laid over the file, as table.key=value.
    memory
        What a rank may keep: parameters, gradients, optimizer state, activations, workspace.
    what_if
        The same with something else: memory=8GiB,rate=10gbit,latency=50us,ranks=16; may be given
        again.
    pareto
        Plan for so many budgets from the least to what everything needs.
    """
    from stretto.plan.explain import explain
    from stretto.recipes import load_run
    from stretto.study.planning import Setting, allowed_by, changed, check_place, comparison
    from stretto.study.planning import pareto as plan_for_each
    from stretto.telemetry.aside import write_aside
    from stretto.units import parse_bytes

    # model.target may name a module beside the run file or where we stand, as for training.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    for path, flag in ((output.out, "--out"), (output.page, "--page")):
        if path is not None:
            check_place(path, flag)
    config = load_run(run, overrides).config
    budget = parse_bytes(memory)
    setting = Setting(_profile(config, source), budget, allowed_by(config))
    others = [(text, changed(setting, text)) for text in what_if]
    planned = setting.plan()
    told = explain(planned, setting.profile)
    write_aside(output.out, planned.plan.to_json() + "\n")
    compared = [comparison(text, planned, other.plan()) for text, other in others]
    points = plan_for_each(setting, pareto) if pareto else []
    if output.page is not None:
        _write_page(output.page, run, setting, planned, told, points)
    if output.json_:
        _print_json(planned, told, compared, points)
    else:
        _print(setting, planned, told, compared, points)
    _say(f"wrote {output.out}" + (f" and {output.page}" if output.page else ""))
    return 0


def _profile(config: "RunConfig", source: Source) -> "Profile":
    from stretto.cluster.detect import detect
    from stretto.errors import ConfigError
    from stretto.plan.profile import read_profile
    from stretto.study.profiling import Asked, profile_run

    if source.profile is not None:
        return read_profile(source.profile)
    if source.cluster is None:
        raise ConfigError(
            "a plan needs to know what the model and the links take: --profile FILE, made by "
            "stretto profile; or --cluster, a file of stretto calibrate or a name, for an estimate"
        )
    asked = Asked(device=source.device, cluster=source.cluster, estimate=True)
    return profile_run(config, detect(), asked, _say)


def _write_page(
    path: Path,
    run: Path,
    setting: "Setting",
    planned: "Planned",
    told: "Explained",
    points: list[tuple[int, float]],
) -> None:
    from stretto.plan.explain import HEADERS
    from stretto.report.planned import PlanPage, write_plan_page

    page = PlanPage(
        title=f"A plan for {run.name}",
        verdict=f"{told.verdict}. {told.memory}.",
        profile=setting.profile,
        plan=planned.plan,
        budget=planned.budget,
        headers=HEADERS,
        rows=told.rows,
        pareto=points,
    )
    write_plan_page(path, page)


def _print(
    setting: "Setting",
    planned: "Planned",
    told: "Explained",
    compared: list[str],
    points: list[tuple[int, float]],
) -> None:
    from stretto.plan.explain import HEADERS
    from stretto.units import format_bytes, format_s

    rows = [HEADERS, *(tuple(_short(cell) for cell in row) for row in told.rows[:_MOST_ROWS])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADERS))]
    for row in rows:
        pairs = zip(row, widths, strict=True)
        print("  ".join(f"{cell:<{width}}" for cell, width in pairs).rstrip())
    if len(told.rows) > _MOST_ROWS:
        print(f"and {len(told.rows) - _MOST_ROWS} more")
    print(told.verdict)
    print(told.memory)
    print(f"profile: {setting.profile.source or 'of unknown origin'}")
    for line in compared:
        print(f"if {line}")
    for num_bytes, step_s in points:
        print(f"{format_bytes(num_bytes):>12} {format_s(step_s):>10} a step")


def _print_json(
    planned: "Planned", told: "Explained", compared: list[str], points: list[tuple[int, float]]
) -> None:
    from stretto.plan.explain import HEADERS, ms_per_gib

    found = {
        "step_s": planned.step_s,
        "bound_s": planned.bound_s,
        "greedy_s": planned.greedy_s,
        "peak_bytes": planned.peak_bytes,
        "budget": planned.budget,
        "ms_per_gib": ms_per_gib(planned),
        "from": planned.how,
        "units": [dict(zip(HEADERS, row, strict=True)) for row in told.rows],
        "what_if": compared,
        "pareto": points,
    }
    print(json.dumps(found))


def _short(cell: str) -> str:
    return cell if len(cell) <= 100 else f"{cell[:48]} .. {cell[-48:]}"


def _say(line: str) -> None:
    print(f"stretto plan: {line}", file=sys.stderr)

"""``stretto bench``: time Stretto against peers and a lower bound, interleaved in one run."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from stretto.bench import CollectiveRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.cluster.world import World
    from stretto.profiler.interleaved_timing import BenchmarkRow
    from stretto.run import RunConfig

RunFile = Annotated[Path | None, Parameter(name=("--run", "--run-file"))]

bench = App(name="bench", help="Measure on the ranks of this job (a lab, torchrun).")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingFlags:
    """How often steps are timed."""

    runs: int = 9
    """Interleaved repetitions; the median counts."""
    steps: int = 2
    """Steps in one timing; a whole period, if a strategy has one."""


@bench.command
def step(
    *overrides: str,
    run: RunFile = None,
    timing_flags: Annotated[TimingFlags, Parameter(name="*")] = TimingFlags(),  # noqa: B008 - frozen
    peers: str = "",
    device: str = "cpu",
    json_: bool = False,
) -> int:
    """Time a training step against tuned peers and against no communication: seconds and bytes.

    Example: stretto lab --hosts 4 --rate 400mbit -- stretto bench step strategy.kind=sharded

    Parameters
    ----------
    overrides
        Settings of the run that is timed, as table.key=value.
    run
        A run file; a GPT of about 25 MB when left out. (torchrun takes --run for one of its own.)
    peers
        ddp, fsdp2, both as ddp,fsdp2, or none; when left out, ddp, and fsdp2 for a sharded
        strategy.
    device
        cpu (Gloo) or cuda (NCCL).
    json_
        One object a line on standard output; bound_s is null if the links' rate is unknown.
    """
    from stretto.bench.step import TimingOptions, bench_step
    from stretto.errors import ConfigError

    world = _detect_world("step", timing_flags.runs)
    if timing_flags.steps < 1:
        raise ConfigError(f"--steps {timing_flags.steps}: expected at least 1")
    config = _load_config(run, overrides, world)
    log_line = _say if world.rank == 0 else lambda _: None
    timing = TimingOptions(timing_flags.runs, timing_flags.steps)
    rows = bench_step(config, world, timing=timing, log_line=log_line, peers=peers, device=device)
    if world.rank == 0:
        _print(rows, as_json=json_)
    return 0


@bench.command
def plans(
    profile: Path,
    /,
    *overrides: str,
    run: RunFile = None,
    runs: int = 5,
    device: str = "cpu",
    shares: int = 0,
    json_: bool = False,
) -> int:
    """Time plans for three memory limits, presets and FSDP2: seconds, bytes, and predictions.

    Example: stretto lab --hosts 4 --rate 800mbit -- stretto bench plans profile.json

    Parameters
    ----------
    profile
        A file of stretto profile, of the same run on as many ranks.
    overrides
        Settings of the run that is timed, as table.key=value.
    run
        A run file; a GPT of about 25 MB when left out. (torchrun takes --run for one of its own.)
    runs
        Interleaved repetitions; the median counts.
    device
        cpu (Gloo) or cuda (NCCL).
    shares
        Instead, for the middle memory limit: this many splits by hand, and the plan.
    json_
        One object a line on standard output.
    """
    from stretto.bench.plans import PlanBenchOptions, as_rows, bench_plans

    world = _detect_world("plans", runs)
    config = _load_config(run, overrides, world)
    log_line = _say if world.rank == 0 else lambda _: None
    measurements = bench_plans(
        config, world, profile, PlanBenchOptions(runs, device, shares), log_line
    )
    if world.rank == 0:
        _print_plan_rows(as_rows(measurements), as_json=json_)
    return 0


@bench.command
def collectives(
    *,
    options: Annotated[CollectiveRequest, Parameter(name="*")] = CollectiveRequest(),  # noqa: B008 - frozen
    cluster: Path | None = None,
    runs: int = 5,
    json_: bool = False,
) -> int:
    """Time collectives by algorithm, against the back end's own.

    Example: stretto lab --hosts 2 --ranks-per-host 4 --rate 400mbit -- stretto bench collectives

    Parameters
    ----------
    cluster
        Description made by stretto calibrate; the algorithm "hybrid" uses its table.
    runs
        Interleaved repetitions; the median counts.
    json_
        One object a line on standard output; bound_s is null if the links' rate is unknown.
    """
    from stretto.bench.collectives import bench_collectives, parse_request

    world = _detect_world("collectives", runs)
    request = parse_request(options, cluster, runs)
    rows = bench_collectives(world, request, _say if world.rank == 0 else lambda _: None)
    if world.rank == 0:
        _print(rows, as_json=json_)
    return 0


def _print_plan_rows(rows: "list[dict[str, Any]]", *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    print(
        f"{'':<24}{'a step':>10}{'spread':>8}{'predicted':>10}"
        f"{'peak':>12}{'predicted':>12}{'limit':>12}"
    )
    for row in rows:
        predicted = _seconds(row["predicted_s"]) if row["predicted_s"] else ""
        limit = _bytes(row["memory_limit"]) if row["memory_limit"] else ""
        predicted_bytes = _bytes(row["predicted_bytes"]) if row["predicted_bytes"] else ""
        print(
            f"{row['name']:<24}{_seconds(row['step_s']):>10}{row['spread']:>8.1%}{predicted:>10}"
            f"{_bytes(row['live_bytes']):>12}{predicted_bytes:>12}{limit:>12}"
        )


def _load_config(run: Path | None, overrides: "Sequence[str]", world: "World") -> "RunConfig":
    from stretto.config import load
    from stretto.recipes import load_run
    from stretto.recipes.small_runs import gpt_25mb
    from stretto.run import RunConfig

    if run is None:
        return load(RunConfig, None, overrides, recipe=gpt_25mb(world.size)).config
    # model.target may name a module beside the run file or in the working directory.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    return load_run(run, overrides).config


def _detect_world(what: str, runs: int) -> "World":
    from stretto.cluster.detect import detect_world
    from stretto.errors import ConfigError

    world = detect_world()
    if runs < 1:
        raise ConfigError(f"--runs {runs}: expected at least 1")
    if world.size < 2:
        raise ConfigError(
            f"bench {what} needs at least 2 ranks: start it as "
            f"`stretto lab --hosts 4 --rate 400mbit -- stretto bench {what}`, or under torchrun"
        )
    return world


def _print(rows: "Sequence[BenchmarkRow]", *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    width = max(len(row.case) for row in rows) + 2
    has_bytes = any(row.ours_bytes is not None for row in rows)
    head = f"{'case':<{width}}{'ours':>10}  {'peer':<22}{'peer':>10}{'ratio':>8}{'bound':>11}"
    print(f"{head}{'spread':>9}" + f"{'ours':>12}{'peer':>12}" * has_bytes)
    for row in rows:
        bound = _seconds(row.bound_s) if row.bound_s else "unknown"
        print(
            f"{row.case:<{width}}{_seconds(row.ours_s):>10}  {row.peer:<22}"
            f"{_seconds(row.peer_s):>10}{row.ratio:>8.3f}{bound:>11}{row.spread:>8.1%}"
            + f"{_bytes(row.ours_bytes):>13}{_bytes(row.peer_bytes):>12}"
            * has_bytes
        )


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.3f} ms"


def _bytes(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 1e6:.1f} MB"


def _say(line: str) -> None:
    print(f"stretto bench: {line}", file=sys.stderr)

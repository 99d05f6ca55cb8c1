"""``stretto bench``: ours against the peer and the bound, interleaved in one run."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from stretto.measure.wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.cluster.world import World
    from stretto.measure.interleave import Row
    from stretto.run import RunConfig

RunFile = Annotated[Path | None, Parameter(name=("--run", "--run-file"))]

bench = App(name="bench", help="Measure on the ranks this was started as (a lab, torchrun).")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """How often steps are timed."""

    runs: int = 9
    """Interleaved repetitions; the median counts."""
    steps: int = 2
    """Steps that are timed as one: those of a whole period, where a strategy has one."""


@bench.command
def step(
    *overrides: str,
    run: RunFile = None,
    timed: Annotated[Timed, Parameter(name="*")] = Timed(),  # noqa: B008 - frozen
    peers: str = "",
    device: str = "cpu",
    json_: bool = False,
) -> int:
    """A training step: seconds and bytes, against peers at their best and no communication.

    Example: stretto lab --hosts 4 --rate 400mbit -- stretto bench step strategy.kind=sharded

    Parameters
    ----------
    overrides
        Settings of the run that is timed, as table.key=value.
    run
        A run file; a GPT of about 25 MB when left out. (torchrun takes --run for one of its own.)
    peers
        ddp, fsdp2, or both as ddp,fsdp2, or none; when left out, ddp, and fsdp2 beside a sharded
        strategy.
    device
        cpu (Gloo) or cuda (NCCL).
    json_
        One object a line on standard output; bound_s is null where the links' rate is not known.
    """
    from stretto.errors import ConfigError
    from stretto.study.step import Timing, bench_step

    world = _world("step", timed.runs)
    if timed.steps < 1:
        raise ConfigError(f"--steps {timed.steps}: expected at least 1")
    config = _config(run, overrides, world)
    say = _say if world.rank == 0 else lambda _: None
    timing = Timing(timed.runs, timed.steps)
    rows = bench_step(config, world, timing=timing, say=say, peers=peers, device=device)
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
    """Plans for three budgets beside presets and FSDP2: seconds, bytes, and what was promised.

    Example: stretto lab --hosts 4 --rate 800mbit -- stretto bench plans profile.json

    Parameters
    ----------
    profile
        Made by stretto profile, of the same run on as many ranks.
    overrides
        Settings of the run that is timed, as table.key=value.
    run
        A run file; a GPT of about 25 MB when left out. (torchrun takes --run for one of its own.)
    runs
        Interleaved repetitions; the median counts.
    device
        cpu (Gloo) or cuda (NCCL).
    shares
        Instead: the middle budget split by hand in so many ways, beside the plan for it.
    json_
        One object a line on standard output.
    """
    from stretto.study.plans import Asked, as_rows, bench_plans

    world = _world("plans", runs)
    config = _config(run, overrides, world)
    say = _say if world.rank == 0 else lambda _: None
    seen = bench_plans(config, world, profile, Asked(runs, device, shares), say)
    if world.rank == 0:
        _print_seen(as_rows(seen), as_json=json_)
    return 0


@bench.command
def collectives(
    *,
    wanted: Annotated[Wanted, Parameter(name="*")] = Wanted(),  # noqa: B008 - frozen
    cluster: Path | None = None,
    runs: int = 5,
    json_: bool = False,
) -> int:
    """Collectives by algorithm, against the back end's own.

    Example: stretto lab --hosts 2 --ranks-per-host 4 --rate 400mbit -- stretto bench collectives

    Parameters
    ----------
    cluster
        Description made by stretto calibrate; its table is what hybrid means.
    runs
        Interleaved repetitions; the median counts.
    json_
        One object a line on standard output; bound_s is null where the links' rate is not known.
    """
    from stretto.study.collectives import bench_collectives, request_of

    world = _world("collectives", runs)
    request = request_of(wanted, cluster, runs)
    rows = bench_collectives(world, request, _say if world.rank == 0 else lambda _: None)
    if world.rank == 0:
        _print(rows, as_json=json_)
    return 0


def _print_seen(rows: "list[dict[str, Any]]", *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    print(f"{'':<24}{'a step':>10}{'spread':>8}{'told':>10}{'lived':>12}{'told':>12}{'budget':>12}")
    for row in rows:
        told = _seconds(row["told_s"]) if row["told_s"] else ""
        budget = _bytes(row["budget"]) if row["budget"] else ""
        promised = _bytes(row["told_bytes"]) if row["told_bytes"] else ""
        print(
            f"{row['name']:<24}{_seconds(row['step_s']):>10}{row['spread']:>8.1%}{told:>10}"
            f"{_bytes(row['live_bytes']):>12}{promised:>12}{budget:>12}"
        )


def _config(run: Path | None, overrides: "Sequence[str]", world: "World") -> "RunConfig":
    from stretto.config import load
    from stretto.recipes import load_run
    from stretto.recipes.benchmarks import gpt_25mb
    from stretto.run import RunConfig

    if run is None:
        return load(RunConfig, None, overrides, recipe=gpt_25mb(world.size)).config
    # model.target may name a module beside the run file or where we stand, as for training.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    return load_run(run, overrides).config


def _world(what: str, runs: int) -> "World":
    from stretto.cluster.detect import detect
    from stretto.errors import ConfigError

    world = detect()
    if runs < 1:
        raise ConfigError(f"--runs {runs}: expected at least 1")
    if world.size < 2:
        raise ConfigError(
            f"bench {what} needs at least 2 ranks: start it as "
            f"`stretto lab --hosts 4 --rate 400mbit -- stretto bench {what}`, or under torchrun"
        )
    return world


def _print(rows: "Sequence[Row]", *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    width = max(len(row.case) for row in rows) + 2
    counted = any(row.ours_bytes is not None for row in rows)
    head = f"{'case':<{width}}{'ours':>10}  {'peer':<22}{'peer':>10}{'ratio':>8}{'bound':>11}"
    print(f"{head}{'spread':>9}" + f"{'ours':>12}{'peer':>12}" * counted)
    for row in rows:
        bound = _seconds(row.bound_s) if row.bound_s else "unknown"
        print(
            f"{row.case:<{width}}{_seconds(row.ours_s):>10}  {row.peer:<22}"
            f"{_seconds(row.peer_s):>10}{row.ratio:>8.3f}{bound:>11}{row.spread:>8.1%}"
            + f"{_bytes(row.ours_bytes):>13}{_bytes(row.peer_bytes):>12}"
            * counted
        )


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.3f} ms"


def _bytes(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 1e6:.1f} MB"


def _say(line: str) -> None:
    print(f"stretto bench: {line}", file=sys.stderr)

"""``stretto bench``: ours against the peer and the bound, interleaved in one run."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.measure.interleave import Row


def bench(what: Literal["step"], /, *overrides: str, runs: int = 9, json_: bool = False) -> int:
    """Measure WHAT on the ranks this was started as (a lab, torchrun).

    Parameters
    ----------
    what
        step: a training step of a GPT of about 25 MB, against DDP at its best setting.
    overrides
        Settings of the run that is timed, as table.key=value.
    runs
        Interleaved repetitions; the median counts.
    json_
        One object a line on standard output; bound_s is null where the links' rate is not known.
    """
    from stretto.cluster.detect import detect
    from stretto.config import load
    from stretto.errors import ConfigError
    from stretto.recipes.benchmarks import gpt_25mb
    from stretto.run import RunConfig
    from stretto.study.step import bench_step

    world = detect()
    if runs < 1:
        raise ConfigError(f"--runs {runs}: expected at least 1")
    if world.size < 2:
        raise ConfigError(
            "bench step needs at least 2 ranks: start it as "
            "`stretto lab --hosts 4 --rate 400mbit -- stretto bench step`, or under torchrun"
        )
    config = load(RunConfig, None, overrides, recipe=gpt_25mb(world.size)).config
    rows = bench_step(config, world, runs=runs, say=_say if world.rank == 0 else lambda _: None)
    if world.rank == 0:
        _print(rows, as_json=json_)
    return 0


def _print(rows: "Sequence[Row]", *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    print(f"{'case':<22}{'ours':>9}  {'peer':<22}{'peer':>9}{'ratio':>8}{'bound':>9}{'spread':>9}")
    for row in rows:
        bound = f"{row.bound_s:.3f} s" if row.bound_s else "unknown"
        print(
            f"{row.case:<22}{row.ours_s:>7.3f} s  {row.peer:<22}{row.peer_s:>7.3f} s"
            f"{row.ratio:>8.3f}{bound:>9}{row.spread:>8.1%}"
        )


def _say(line: str) -> None:
    print(f"stretto bench: {line}", file=sys.stderr)

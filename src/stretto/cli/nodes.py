"""``stretto study nodes``: what a step takes as hosts grow."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.study.nodes.study import Plan
    from stretto.study.predicted.subject import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """The hosts, and what joins them."""

    hosts: str
    """How many, in turn, as 2,4,6,8."""
    ranks_per_host: int = 1
    """Ranks that share a host and its link."""
    rate: str = "200mbit"
    """Rate of each link in each direction."""
    samples: int | None = None
    """Of each rank in a step; when left out, the run's batch is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What predictions are made from."""

    profile: Path | None = None
    """Made by stretto profile: what the model takes; estimated when left out."""
    cluster: str | None = None
    """A file of stretto calibrate, or a name: links and cores, instead of those of a lab."""
    device: str = "cpu"
    """What an estimate is for: cpu, h200, or operations and bytes a second as 3e14,2e12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """What is measured, and where it is written."""

    measure: bool = False
    """Time the steps as well, in a lab of as many hosts (root)."""
    runs: int = 5
    """Repetitions of each; the median counts."""
    out: Path = Path("nodes.json")
    """The record, written after every cell: an interrupted study goes on with it."""
    json_: bool = False
    """One object a cell on standard output."""


def nodes(
    run: Path,
    /,
    *overrides: str,
    strategies: str = "",
    lab: Annotated[Lab, Parameter(name="*")],
    told: Annotated[Told, Parameter(name="*")] = Told(),  # noqa: B008 - frozen
    measuring: Annotated[Measuring, Parameter(name="*")] = Measuring(),  # noqa: B008 - frozen
) -> int:
    """Step times by number of hosts: predicted, and with --measure those of a lab beside them.

    Example: stretto study nodes run.toml --hosts 2,4 --strategies allreduce,crossover:delay=1

    Parameters
    ----------
    run
        The run file (TOML), or the name of a recipe.
    overrides
        Settings laid over the file, as table.key=value.
    strategies
        What is compared; settings follow the word: allreduce,crossover:delay=1; or all. The run's
        own when left out.
    """
    from stretto.cluster.detect import detect
    from stretto.study.nodes.lab import measure_in_lab
    from stretto.study.nodes.record import open_record
    from stretto.study.nodes.study import carry_out, study_settings, table
    from stretto.study.planning import check_place
    from stretto.study.predicted.prices import Predictor

    # model.target may name a module beside the run file or where we stand, as for training.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    check_place(measuring.out, "--out")
    plan = _plan(run, overrides, strategies, lab, measuring.runs)
    if measuring.measure and min(plan.hosts) * plan.ranks_per_host < 2:
        raise ConfigError(f"--hosts {lab.hosts} --measure: one rank alone has nobody to talk to")
    source = _source(told, lab)
    record = open_record(measuring.out, study_settings(plan, source))
    predictor = Predictor(source, detect(), lab.samples)
    measure = measure_in_lab if measuring.measure else None
    cells = carry_out(plan, predictor, record, measure, _say)
    if measuring.json_:
        for cell in cells:
            print(json.dumps(asdict(cell)))
    else:
        _print(table(cells))
    _say(f"the record is {measuring.out}")
    return 0


def _plan(run: Path, overrides: "Sequence[str]", strategies: str, lab: Lab, runs: int) -> "Plan":
    from stretto.study.nodes.study import Plan
    from stretto.study.predicted.variants import find_variants

    for name, count in (("--ranks-per-host", lab.ranks_per_host), ("--runs", runs)):
        if count < 1:
            raise ConfigError(f"{name} {count}: expected at least 1")
    if lab.samples is not None and lab.samples < 1:
        raise ConfigError(f"--samples {lab.samples}: expected at least 1")
    words = [word.strip() for word in lab.hosts.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--hosts {lab.hosts}: expected numbers of hosts, as 2,4,6,8")
    hosts = [int(word) for word in words]
    variants = find_variants(run, overrides, strategies)
    return Plan(run, variants, hosts, lab.ranks_per_host, lab.rate, runs, lab.samples)


def _source(told: Told, lab: Lab) -> "Source":
    import os

    from stretto.plan.linking import described
    from stretto.study.nodes.study import lab_cluster
    from stretto.study.predicted.subject import Source
    from stretto.units import parse_bits_per_s

    rate = parse_bits_per_s(lab.rate)
    if not rate:
        raise ConfigError(f"--rate {lab.rate}: nothing could be sent")
    if told.cluster is not None:
        cluster, name = described(told.cluster), told.cluster
    else:
        cluster, name = lab_cluster(rate, len(os.sched_getaffinity(0))), f"a lab at {lab.rate}"
    return Source(cluster, name, told.profile, told.device)


def _print(rows: "Sequence[tuple[str, ...]]") -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = zip(row, widths, strict=True)
        print("  ".join(f"{cell:<{width}}" for cell, width in pairs).rstrip())


def _say(line: str) -> None:
    print(f"stretto study: {line}", file=sys.stderr)

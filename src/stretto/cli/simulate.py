"""``stretto simulate``: what would happen on a cluster nobody has here."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.cluster.world import Mesh
    from stretto.sim.book import PriceList
    from stretto.sim.catalogue import Choice
    from stretto.sim.cluster import Cluster
    from stretto.study.predicted.prices import Row

simulate = App(name="simulate", help="Predict, on a cluster that is described but not here.")


@simulate.command
def collectives(
    *,
    ranks: int | None = None,
    ranks_per_host: int | None = None,
    sizes: str = "1KB,1MB,100MB",
    cluster: str = "gpu nodes 100gbit",
    table: bool = False,
    json_: bool = False,
) -> int:
    """Price every all-reduce algorithm by message size, or print the table of the cheapest.

    Example: stretto simulate collectives --ranks 10000 --ranks-per-host 8 --sizes 100MB

    Parameters
    ----------
    ranks
        How many; those of the cluster's description when left out.
    ranks_per_host
        Ranks that share a host and its link; 1 when left out.
    sizes
        Bytes of the tensor, as 1KB,32MB.
    cluster
        A file written by stretto calibrate, or a name: "ethernet 10gbit", "box 400mbit",
        "gpu nodes 100gbit".
    table
        Print which algorithm to take from which size on, and why, instead of all prices.
    json_
        One object a line on standard output.
    """
    from stretto.sim.catalogue import price_all
    from stretto.sim.choosing import choose_rows
    from stretto.units import parse_bytes

    described = _described(cluster, ranks, ranks_per_host)
    if table:
        _print_choices(choose_rows(described), as_json=json_)
        return 0
    wanted = [parse_bytes(size) for size in sizes.split(",")]
    _print_prices(price_all(described, wanted, parts=(1,)), wanted, as_json=json_)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many ranks, and what each has to do."""

    ranks: str
    """How many, as 8,64,1024."""
    ranks_per_host: int = 1
    """Ranks that share a host and its link."""
    samples: int | None = None
    """Of each rank in a step; when left out, the run's batch is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Where seconds are from."""

    cluster: str = "ethernet 10gbit"
    """A file written by stretto calibrate, or a name: "ethernet 10gbit", "box 400mbit",
    "gpu nodes 100gbit"."""
    profile: Path | None = None
    """Made by stretto profile: what the model takes; estimated when left out."""
    device: str = "cpu"
    """What an estimate is for: cpu, h200, or operations and bytes a second as 3e14,2e12."""


@simulate.command
def step(
    run: Path,
    /,
    *overrides: str,
    shape: Annotated[Shape, Parameter(name="*")],
    strategies: str = "",
    figures: Annotated[Figures, Parameter(name="*")] = Figures(),  # noqa: B008 - frozen
    json_: bool = False,
) -> int:
    """Price a training step of RUN under its strategy, or under others, on any number of ranks.

    Example: stretto simulate step run.toml --ranks 8,1024 --strategies allreduce,sgp:delay=1

    Parameters
    ----------
    run
        The run file (TOML), or the name of a recipe.
    overrides
        Settings laid over the file, as table.key=value.
    strategies
        What is compared; settings follow the word: allreduce,crossover:delay=1; or all. The run's
        own when left out.
    json_
        One object a line on standard output.
    """
    from stretto.cluster.detect import detect
    from stretto.plan.linking import described
    from stretto.study.predicted.prices import Predictor, price_rows
    from stretto.study.predicted.subject import Source
    from stretto.study.predicted.variants import find_variants

    # model.target may name a module beside the run file or where we stand, as for training.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    meshes = _meshes(shape)
    variants = find_variants(run, overrides, strategies)
    name = figures.cluster
    source = Source(described(name), name, figures.profile, figures.device)
    predictor = Predictor(source, detect(), shape.samples)
    width = 2 + max(len("strategy"), *(len(variant.word) for variant in variants))
    if not json_:
        print(f"{'ranks':>8}  {'strategy':<{width}}{_STEP_HEAD}")
    priced = 0
    for row in price_rows(variants, meshes, predictor):
        priced += row.price is not None
        _print_step(row, width, as_json=json_)
    return 0 if priced else 2


def _meshes(shape: Shape) -> "list[Mesh]":
    from stretto.sim.cluster import mesh_of

    if shape.samples is not None and shape.samples < 1:
        raise ConfigError(f"--samples {shape.samples}: expected at least 1")
    words = [word.strip() for word in shape.ranks.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--ranks {shape.ranks}: expected numbers, as 8,64,1024")
    return [mesh_of(int(word), shape.ranks_per_host) for word in words]


_STEP_HEAD = (
    f"{'step':>12}{'compute':>12}{'exposed':>12}{'bound':>12}{'efficiency':>12}"
    f"{'a link carries':>16}  held up by"
)


def _print_step(row: "Row", width: int, *, as_json: bool) -> None:
    from stretto.units import format_bytes, format_s

    price, ranks = row.price, row.mesh.size
    if price is None:
        print(
            f"stretto simulate: {row.strategy} on {ranks} ranks left out: {row.left_out}",
            file=sys.stderr,
        )
        return
    if as_json:
        facts = {"ranks": ranks, "hosts": row.mesh.hosts, "strategy": row.strategy}
        print(json.dumps({**facts, **price.facts()}))
        return
    times = (price.seconds, price.compute_s, price.exposed_s, price.bound_s)
    print(
        f"{ranks:>8}  {row.strategy:<{width}}"
        + "".join(f"{format_s(seconds):>12}" for seconds in times)
        + f"{price.efficiency:>12.1%}{format_bytes(price.bytes_per_link):>16}  {price.held_up_by}"
    )


def _described(name: str, ranks: int | None, per_host: int | None) -> "Cluster":
    from stretto.plan.linking import described
    from stretto.sim.cluster import mesh_of

    found = described(name)
    if ranks is None:
        if per_host is not None:
            raise ConfigError(f"--ranks-per-host {per_host} is for --ranks: say how many there are")
        return found
    return found.with_mesh(mesh_of(ranks, 1 if per_host is None else per_host))


def _print_prices(prices: "PriceList", sizes: list[int], *, as_json: bool) -> None:
    from stretto.sim.serial import serial_steps
    from stretto.units import format_bytes, format_s

    head = f"{'bytes':>8}  {'algorithm':<24}{'time':>10}{'steps':>9}{'a link carries':>16}"
    if not as_json:
        print(f"{head}  held up by")
    steps: dict[str, int] = {}
    for row in (row for size in sizes for row in prices.at(size)):
        name = row.schedule.name
        steps[name] = steps.get(name) or serial_steps(row.schedule)
        if as_json:
            facts = {"bytes": row.num_bytes, "algorithm": name, "seconds": row.price.seconds}
            facts |= {"serial_steps": steps[name], "bytes_per_link": row.price.bytes_per_link}
            print(json.dumps({**facts, "bottleneck": row.price.bottleneck}))
            continue
        print(
            f"{format_bytes(row.num_bytes):>8}  {name:<24}{format_s(row.price.seconds):>10}"
            f"{steps[name]:>9}{format_bytes(row.price.bytes_per_link):>16}  {row.price.bottleneck}"
        )
    for name, why in prices.left_out.items():
        print(f"stretto simulate: {name} left out: {why}", file=sys.stderr)


def _print_choices(rows: "list[Choice]", *, as_json: bool) -> None:
    from stretto.comm.algorithms.table import word_of
    from stretto.units import format_bytes, format_s

    for row in rows:
        name = word_of(row.name, row.parts)
        if as_json:
            facts = {"from_bytes": row.from_bytes, "algorithm": name, "seconds": row.seconds}
            print(json.dumps({**facts, "reason": row.reason}))
        else:
            size, took = format_bytes(row.from_bytes), format_s(row.seconds)
            print(f"from {size:>8}  {name:<26}{took:>10}  {row.reason}")

"""``stretto simulate``: predict costs on a cluster that is described but not available."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.cluster.world import Mesh
    from stretto.simulator.algorithm_choice import AlgorithmRecommendation
    from stretto.simulator.cluster import Cluster
    from stretto.simulator.price_cache import PriceList
    from stretto.studies.strategy_prices import StrategyPrice

simulate = App(name="simulate", help="Predict costs on a described cluster, from any machine.")


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
    """Predict the time of every all-reduce algorithm by message size, or print the fastest.

    Example: stretto simulate collectives --ranks 10000 --ranks-per-host 8 --sizes 100MB

    Parameters
    ----------
    ranks
        Number of ranks; by default that of the cluster's description.
    ranks_per_host
        Ranks that share a host and its link; 1 when left out.
    sizes
        Bytes of the tensor, as 1KB,32MB.
    cluster
        A file written by stretto calibrate, or a name: "ethernet 10gbit", "box 400mbit",
        "gpu nodes 100gbit".
    table
        Print the fastest algorithm from each size on, and why, instead of all times.
    json_
        Print one object a line on standard output.
    """
    from stretto.simulator.algorithm_choice import price_all_algorithms, recommend_by_size
    from stretto.units import parse_bytes

    described = _load_cluster(cluster, ranks, ranks_per_host)
    if table:
        _print_choices(recommend_by_size(described), as_json=json_)
        return 0
    size_bytes = [parse_bytes(size) for size in sizes.split(",")]
    _print_prices(
        price_all_algorithms(described, size_bytes, parts=(1,)), size_bytes, as_json=json_
    )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFlags:
    """Numbers of ranks and samples."""

    ranks: str
    """Numbers of ranks, as 8,64,1024."""
    ranks_per_host: int = 1
    """Ranks that share a host and its link."""
    samples: int | None = None
    """Samples of each rank in a step; when left out, ranks share the run's batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSourceFlags:
    """Measured or estimated costs."""

    cluster: str = "ethernet 10gbit"
    """A file written by stretto calibrate, or a name: "ethernet 10gbit", "box 400mbit",
    "gpu nodes 100gbit"."""
    profile: Path | None = None
    """A file of stretto profile with the model's costs; estimated when left out."""
    device: str = "cpu"
    """Device of the estimate: cpu, h200, or operations and bytes per second as 3e14,2e12."""


@simulate.command
def step(
    run: Path,
    /,
    *overrides: str,
    scale: Annotated[ScaleFlags, Parameter(name="*")],
    strategies: str = "",
    cost_flags: Annotated[CostSourceFlags, Parameter(name="*")] = CostSourceFlags(),  # noqa: B008 - frozen
    json_: bool = False,
) -> int:
    """Predict a training step of RUN with its strategy or others, on any number of ranks.

    Example: stretto simulate step run.toml --ranks 8,1024 --strategies allreduce,sgp:delay=1

    Parameters
    ----------
    run
        The run file (TOML), or the name of a recipe.
    overrides
        Settings that override the file, as table.key=value.
    strategies
        Strategies to compare, with settings after a colon: allreduce,crossover:delay=1; or all.
        The run's own when left out.
    json_
        Print one object a line on standard output.
    """
    from stretto.cluster.detect import detect_world
    from stretto.planner.profile import load_cluster_or_preset
    from stretto.studies.priced_run import CostSource, find_variants
    from stretto.studies.strategy_prices import Predictor, price_strategies

    # model.target may name a module beside the run file or in the working directory.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    meshes = _meshes(scale)
    variants = find_variants(run, overrides, strategies)
    name = cost_flags.cluster
    source = CostSource(load_cluster_or_preset(name), name, cost_flags.profile, cost_flags.device)
    predictor = Predictor(source, detect_world(), scale.samples)
    width = 2 + max(len("strategy"), *(len(variant.spec) for variant in variants))
    if not json_:
        print(f"{'ranks':>8}  {'strategy':<{width}}{_STEP_HEAD}")
    priced = 0
    for row in price_strategies(variants, meshes, predictor):
        priced += row.price is not None
        _print_step(row, width, as_json=json_)
    return 0 if priced else 2


def _meshes(scale: ScaleFlags) -> "list[Mesh]":
    from stretto.simulator.cluster import mesh_of

    if scale.samples is not None and scale.samples < 1:
        raise ConfigError(f"--samples {scale.samples}: expected at least 1")
    counts = [count.strip() for count in scale.ranks.split(",")]
    if not all(count.isdecimal() for count in counts):
        raise ConfigError(f"--ranks {scale.ranks}: expected numbers, as 8,64,1024")
    return [mesh_of(int(count), scale.ranks_per_host) for count in counts]


_STEP_HEAD = (
    f"{'step':>12}{'compute':>12}{'exposed':>12}{'bound':>12}{'efficiency':>12}"
    f"{'a link carries':>16}  held up by"
)


def _print_step(row: "StrategyPrice", width: int, *, as_json: bool) -> None:
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
        + f"{price.efficiency:>12.1%}{format_bytes(price.bytes_per_link):>16}  {price.bottleneck}"
    )


def _load_cluster(name: str, ranks: int | None, per_host: int | None) -> "Cluster":
    from stretto.planner.profile import load_cluster_or_preset
    from stretto.simulator.cluster import mesh_of

    found = load_cluster_or_preset(name)
    if ranks is None:
        if per_host is not None:
            raise ConfigError(f"--ranks-per-host {per_host} needs --ranks: say how many there are")
        return found
    return found.with_mesh(mesh_of(ranks, 1 if per_host is None else per_host))


def _print_prices(prices: "PriceList", sizes: list[int], *, as_json: bool) -> None:
    from stretto.simulator.closed_forms import serial_steps
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
    for name, reason in prices.left_out.items():
        print(f"stretto simulate: {name} left out: {reason}", file=sys.stderr)


def _print_choices(rows: "list[AlgorithmRecommendation]", *, as_json: bool) -> None:
    from stretto.collectives.algorithm_table import algorithm_text
    from stretto.units import format_bytes, format_s

    for row in rows:
        name = algorithm_text(row.name, row.parts)
        if as_json:
            facts = {"from_bytes": row.from_bytes, "algorithm": name, "seconds": row.seconds}
            print(json.dumps({**facts, "reason": row.reason}))
        else:
            size, took = format_bytes(row.from_bytes), format_s(row.seconds)
            print(f"from {size:>8}  {name:<26}{took:>10}  {row.reason}")

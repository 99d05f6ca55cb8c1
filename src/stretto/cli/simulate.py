"""``stretto simulate``: what would happen on a cluster nobody has here."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.sim.book import PriceList
    from stretto.sim.catalogue import Choice
    from stretto.sim.cluster import Cluster

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


def _described(name: str, ranks: int | None, per_host: int | None) -> "Cluster":
    from stretto.cluster.world import Mesh
    from stretto.sim.cluster import load_cluster
    from stretto.sim.presets import PRESETS, preset

    found = preset(name) if name in PRESETS or "." not in name else load_cluster(Path(name))
    if ranks is None:
        if per_host is not None:
            raise ConfigError(f"--ranks-per-host {per_host} is for --ranks: say how many there are")
        return found
    per_host = 1 if per_host is None else per_host
    if ranks < 1 or per_host < 1:
        raise ConfigError(
            f"--ranks {ranks} --ranks-per-host {per_host}: expected at least 1 of each"
        )
    hosts, rest = divmod(ranks, per_host)
    return found.with_mesh(Mesh((per_host,) * hosts + ((rest,) if rest else ())))


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

"""``stretto show``: draw the schedule of a collective or the rounds of a gossip topology."""

import difflib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.cluster.world import Mesh
    from stretto.collectives.schedule import Schedule
    from stretto.report.schedule_diagram import Diagram

DEFAULT_RANKS = 4
GOSSIP = "gossip"
MAX_RANKS_TIMES_PARTS = 4096
"""Limit of what can be drawn; beyond it even one rank's program takes long to build."""
PIPE_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFlags:
    """The ranks and hosts."""

    ranks: int | None = None
    """Number of ranks, all on one host; 4 when neither ranks nor hosts are given."""
    hosts: int | None = None
    """Number of hosts, instead of ranks."""
    ranks_per_host: int | None = None
    """Ranks on each host; 1 when left out."""


def show(
    algorithm: str,
    /,
    *,
    flags: Annotated[MeshFlags, Parameter(name="*")] = MeshFlags(),  # noqa: B008 - frozen
    collective: str = "allreduce",
    parts: int = 1,
    svg: Path | None = None,
    json_: bool = False,
) -> int:
    """Draw which chunks each rank sends and receives, step by step, with totals.

    Example: stretto show hierarchical --hosts 2 --ranks-per-host 4 --svg hierarchical.svg
    Example: stretto show one-peer-exponential --collective gossip --ranks 8

    Parameters
    ----------
    algorithm
        Its name, such as ring; an unknown name prints the list.
    collective
        allreduce, reduce-scatter, all-gather or broadcast; host-reduce-scatter or
        host-all-gather, where the ranks of each host share the whole tensor; or gossip, to draw
        the rounds of a topology.
    parts
        Number of parts of the tensor that follow each other through the schedule.
    svg
        Write an SVG file instead of drawing on the terminal.
    json_
        Print one object per message on standard output.
    """
    from stretto.report.schedule_diagram import make_diagram

    if svg is not None:
        _check_svg_file(svg)
    mesh = _mesh(flags)
    if collective == GOSSIP:
        if svg is not None or parts != 1:
            raise ConfigError("--svg and --parts are for schedules; leave them out for a topology")
        return _show_topology(algorithm, mesh.size, json_=json_)
    shown = make_diagram(_schedule(algorithm, collective, mesh, parts), mesh, collective)
    if svg is not None:
        _write_svg(svg, shown)
    if json_:
        for message in shown.messages:
            print(json.dumps({**asdict(message), "action": message.action.value}))
    elif svg is None:
        _print_diagram(shown)
    return 0


def _show_topology(name: str, size: int, *, json_: bool) -> int:
    from stretto.topology import make_topology
    from stretto.topology.analysis import analyze_topology, round_graph, round_lines

    topology = make_topology(name)
    topology.check(size)
    drawn = round_lines(topology, size)
    if json_:
        for number in range(len(drawn)):
            edges = round_graph(topology, size, number).edges(data="weight")
            print(json.dumps({"round": number, "messages": [list(edge) for edge in edges]}))
        return 0
    for number, line in enumerate(drawn):
        print(f"round {number}: {line}")
    found = analyze_topology(topology, size)
    exact = found.rounds_to_consensus
    print(
        f"{name}, {size} ranks: at most {found.max_messages.sends} sent and "
        f"{found.max_messages.receives} received by a rank in a round; "
        + ("never exactly equal" if exact is None else f"exactly equal after {exact} rounds")
        + ("" if found.spectral_gap is None else f"; spectral gap {found.spectral_gap:.3f}")
        + ("" if found.doubly_stochastic else "; needs push-sum")
    )
    return 0


def _mesh(flags: MeshFlags) -> "Mesh":
    from stretto.cluster.world import Mesh

    options = (("--ranks", flags.ranks), ("--hosts", flags.hosts))
    for option, number in (*options, ("--ranks-per-host", flags.ranks_per_host)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} {number}: expected at least 1")
    if flags.hosts is None and flags.ranks_per_host is not None:
        raise ConfigError("--ranks-per-host needs --hosts: say how many hosts there are")
    if flags.hosts is None:
        return Mesh((_check_ranks(flags.ranks or DEFAULT_RANKS),))
    if flags.ranks is not None:
        raise ConfigError(
            "--ranks and --hosts exclude each other: --hosts 2 --ranks-per-host 4 are 8 ranks"
        )
    each = flags.ranks_per_host or 1
    _check_ranks(flags.hosts * each)
    return Mesh((each,) * flags.hosts)


def _check_ranks(ranks: int) -> int:
    if ranks > MAX_RANKS_TIMES_PARTS:
        raise ConfigError(f"{ranks:,} ranks: at most {MAX_RANKS_TIMES_PARTS:,} can be shown")
    return ranks


def _schedule(algorithm: str, collective: str, mesh: "Mesh", parts: int) -> "Schedule":
    from stretto.collectives.algorithms import (
        ALL_GATHER,
        ALLREDUCE,
        BROADCAST,
        HOST_ALL_GATHER,
        HOST_REDUCE_SCATTER,
        REDUCE_SCATTER,
    )

    tables = {
        "allreduce": ALLREDUCE,
        "reduce-scatter": REDUCE_SCATTER,
        "all-gather": ALL_GATHER,
        "broadcast": BROADCAST,
        "host-reduce-scatter": HOST_REDUCE_SCATTER,
        "host-all-gather": HOST_ALL_GATHER,
    }
    _check_name("--collective", collective, (*tables, GOSSIP))
    table = tables[collective]
    elsewhere = [name for name, other in tables.items() if algorithm in other]
    if algorithm not in table and elsewhere:
        raise ConfigError(f"{algorithm} is no {collective}: add --collective {elsewhere[0]}")
    _check_name(f"{collective} algorithm", algorithm, table)
    if parts < 1 or mesh.size * parts > MAX_RANKS_TIMES_PARTS:
        most = MAX_RANKS_TIMES_PARTS // mesh.size
        raise ConfigError(f"--parts {parts}: expected 1 to {most:,} with {mesh.size:,} ranks")
    schedule = table[algorithm](mesh, parts)
    if parts > 1 and schedule.num_chunks == table[algorithm](mesh, 1).num_chunks:
        raise ConfigError(f"--parts {parts}: {algorithm} takes the tensor whole; leave --parts out")
    return schedule


def _check_name(what: str, name: str, choices: Iterable[str]) -> None:
    names = list(choices)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(f"no {what} {name!r}{hint} known: {', '.join(names)}")


def _check_svg_file(svg: Path) -> None:
    if svg.is_dir():
        raise ConfigError(f"--svg {svg} is a folder: name a file")
    if not svg.parent.is_dir():
        raise ConfigError(f"--svg {svg}: there is no folder {svg.parent}; make it, or name another")


def _write_svg(svg: Path, shown: "Diagram") -> None:
    from stretto.report.schedule_svg import draw_svg
    from stretto.telemetry.sinks import write_atomically

    write_atomically(svg, draw_svg(shown))
    print(f"stretto show: wrote {svg}", file=sys.stderr)


def _print_diagram(shown: "Diagram") -> None:
    from rich.console import Console

    from stretto.report.schedule_terminal import draw_text

    console = Console()
    width = console.width if console.is_terminal else PIPE_WIDTH
    # The drawing is made for this width, so the console must not wrap it.
    console.print(draw_text(shown, width), soft_wrap=True, highlight=False)

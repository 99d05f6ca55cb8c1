"""``stretto show``: a collective's schedule, or who talks to whom in gossip, drawn."""

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
    from stretto.comm.schedule import Schedule
    from stretto.report.drawing.diagram import Diagram

DEFAULT_RANKS = 4
GOSSIP = "gossip"
MOST_RANKS_TIMES_PARTS = 4096
"""Beyond it even one rank's program takes long to write down."""
WIDTH_OF_A_PIPE = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Among:
    """Who takes part."""

    ranks: int | None = None
    """Ranks, all on one host; 4 when neither these nor hosts are given."""
    hosts: int | None = None
    """Hosts, instead of ranks."""
    ranks_per_host: int | None = None
    """Ranks on each host; 1 when left out."""


def show(
    algorithm: str,
    /,
    *,
    among: Annotated[Among, Parameter(name="*")] = Among(),  # noqa: B008 - frozen
    collective: str = "allreduce",
    parts: int = 1,
    svg: Path | None = None,
    json_: bool = False,
) -> int:
    """Draw who sends which chunks to whom, step by step, and what it comes to.

    Example: stretto show hierarchical --hosts 2 --ranks-per-host 4 --svg hierarchical.svg
    Example: stretto show one-peer-exponential --collective gossip --ranks 8

    Parameters
    ----------
    algorithm
        Its name, as ring; a wrong one is answered with the list.
    collective
        allreduce, reduce-scatter, all-gather or broadcast; or host-reduce-scatter or
        host-all-gather, where every host has the whole tensor, shared out among its ranks; or
        gossip, whose topologies have rounds instead.
    parts
        Parts of the tensor that follow each other through the schedule.
    svg
        Draw it into this file, for a browser, and not on the terminal.
    json_
        One object a message on standard output.
    """
    from stretto.report.drawing.diagram import diagram

    if svg is not None:
        _check_file(svg)
    mesh = _mesh(among)
    if collective == GOSSIP:
        if svg is not None or parts != 1:
            raise ConfigError("--svg and --parts are for schedules; leave them out for a topology")
        return _show_topology(algorithm, mesh.size, json_=json_)
    shown = diagram(_schedule(algorithm, collective, mesh, parts), mesh, collective)
    if svg is not None:
        _write(svg, shown)
    if json_:
        for message in shown.messages:
            print(json.dumps({**asdict(message), "action": message.action.value}))
    elif svg is None:
        _draw(shown)
    return 0


def _show_topology(name: str, size: int, *, json_: bool) -> int:
    from stretto.topology import named
    from stretto.topology.analysis import report
    from stretto.topology.draw import graph, lines

    topology = named(name)
    topology.check(size)
    drawn = lines(topology, size)
    if json_:
        for number in range(len(drawn)):
            edges = graph(topology, size, number).edges(data="weight")
            print(json.dumps({"round": number, "messages": [list(edge) for edge in edges]}))
        return 0
    for number, line in enumerate(drawn):
        print(f"round {number}: {line}")
    known = report(topology, size)
    exact = known.rounds_to_consensus
    print(
        f"{name}, {size} ranks: at most {known.most_messages.sends} sent and "
        f"{known.most_messages.receives} received by a rank in a round; "
        + ("never exactly equal" if exact is None else f"exactly equal after {exact} rounds")
        + ("" if known.spectral_gap is None else f"; spectral gap {known.spectral_gap:.3f}")
        + ("" if known.doubly_stochastic else "; needs push-sum")
    )
    return 0


def _mesh(among: Among) -> "Mesh":
    from stretto.cluster.world import Mesh

    given = (("--ranks", among.ranks), ("--hosts", among.hosts))
    for option, number in (*given, ("--ranks-per-host", among.ranks_per_host)):
        if number is not None and number < 1:
            raise ConfigError(f"{option} {number}: expected at least 1")
    if among.hosts is None and among.ranks_per_host is not None:
        raise ConfigError("--ranks-per-host is for --hosts: say how many hosts there are")
    if among.hosts is None:
        return Mesh((_few(among.ranks or DEFAULT_RANKS),))
    if among.ranks is not None:
        raise ConfigError(
            "--ranks and --hosts exclude each other: --hosts 2 --ranks-per-host 4 are 8 ranks"
        )
    each = among.ranks_per_host or 1
    _few(among.hosts * each)
    return Mesh((each,) * among.hosts)


def _few(ranks: int) -> int:
    if ranks > MOST_RANKS_TIMES_PARTS:
        raise ConfigError(f"{ranks:,} ranks: at most {MOST_RANKS_TIMES_PARTS:,} can be shown")
    return ranks


def _schedule(algorithm: str, collective: str, mesh: "Mesh", parts: int) -> "Schedule":
    from stretto.comm.algorithms import (
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
    _check_known("--collective", collective, (*tables, GOSSIP))
    table = tables[collective]
    elsewhere = [name for name, other in tables.items() if algorithm in other]
    if algorithm not in table and elsewhere:
        raise ConfigError(f"{algorithm} is no {collective}: add --collective {elsewhere[0]}")
    _check_known(f"{collective} algorithm", algorithm, table)
    if parts < 1 or mesh.size * parts > MOST_RANKS_TIMES_PARTS:
        most = MOST_RANKS_TIMES_PARTS // mesh.size
        raise ConfigError(f"--parts {parts}: expected 1 to {most:,} with {mesh.size:,} ranks")
    schedule = table[algorithm](mesh, parts)
    if parts > 1 and schedule.num_chunks == table[algorithm](mesh, 1).num_chunks:
        raise ConfigError(f"--parts {parts}: {algorithm} takes the tensor whole; leave --parts out")
    return schedule


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(f"no {what} {name!r}{hint} known: {', '.join(names)}")


def _check_file(svg: Path) -> None:
    if svg.is_dir():
        raise ConfigError(f"--svg {svg} is a folder: name a file")
    if not svg.parent.is_dir():
        raise ConfigError(f"--svg {svg}: there is no folder {svg.parent}; make it, or name another")


def _write(svg: Path, shown: "Diagram") -> None:
    from stretto.report.drawing.svg import draw_svg
    from stretto.telemetry.aside import write_aside

    write_aside(svg, draw_svg(shown))
    print(f"stretto show: wrote {svg}", file=sys.stderr)


def _draw(shown: "Diagram") -> None:
    from rich.console import Console

    from stretto.report.drawing.text import draw_text

    console = Console()
    width = console.width if console.is_terminal else WIDTH_OF_A_PIPE
    # No wrapping by the console: a drawing that fits is drawn to fit, the rest the terminal wraps.
    console.print(draw_text(shown, width), soft_wrap=True, highlight=False)

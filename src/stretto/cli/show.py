"""``stretto show``: draw a collective, the rounds of a gossip topology, or a step of a strategy."""

import difflib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

    from stretto.cluster.world import Mesh
    from stretto.collectives.algorithms import Algorithm
    from stretto.collectives.schedule import Schedule

DEFAULT_RANKS = 4
GOSSIP = "gossip"
MAX_RANKS_TIMES_PARTS = 4096
"""Limit of what can be drawn; beyond it even one rank's program takes long to build."""
PIPE_WIDTH = 120
MAX_RANKS_OF_STEP = 256
"""Limit of the ranks for which a strategy's step is drawn; algorithms are chosen exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowFlags:
    """The ranks and hosts, and the run whose step is drawn."""

    ranks: int | None = None
    """Number of ranks, all on one host; 4 when neither ranks nor hosts are given."""
    hosts: int | None = None
    """Number of hosts, instead of ranks."""
    ranks_per_host: int | None = None
    """Ranks on each host; 1 when left out."""
    run: Path | None = None
    """The run file whose model and settings a strategy's step is drawn for; the embedded default
    when left out."""


def show(
    algorithm: str,
    /,
    *,
    flags: Annotated[ShowFlags, Parameter(name="*")] = ShowFlags(),  # noqa: B008 - frozen
    collective: str = "allreduce",
    parts: int = 1,
    svg: Path | None = None,
    json_: bool = False,
) -> int:
    """Draw which chunks each rank sends and receives, step by step, or a strategy's training step.

    Example: stretto show hierarchical --hosts 2 --ranks-per-host 4 --svg hierarchical.svg
    Example: stretto show one-peer-exponential --collective gossip --ranks 8
    Example: stretto show crossover:delay=1 --ranks 4

    Parameters
    ----------
    algorithm
        Its name, such as ring; an unknown name prints the list. Or a strategy, such as crossover,
        zero3 or diloco:every=8: then a training step is drawn, with what overlaps computation.
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
    from stretto.report.schedule_svg import draw_svg
    from stretto.report.schedule_terminal import draw_text

    if svg is not None:
        _check_svg_file(svg)
    mesh = _mesh(flags)
    is_algorithm = any(algorithm in table for table in _algorithms().values())
    if not is_algorithm and collective != GOSSIP and _strategy_overrides(algorithm):
        return _show_step(algorithm, mesh, flags.run, svg=svg, json_=json_)
    if flags.run is not None:
        raise ConfigError(f"--run is for strategies; {algorithm} is none: leave it out")
    if collective == GOSSIP:
        if svg is not None or parts != 1:
            raise ConfigError("--svg and --parts are for schedules; leave them out for a topology")
        return _show_topology(algorithm, mesh.size, json_=json_)
    shown = make_diagram(_schedule(algorithm, collective, mesh, parts), mesh, collective)
    if svg is not None:
        _write_svg(svg, draw_svg(shown))
    if json_:
        for message in shown.messages:
            print(json.dumps({**asdict(message), "action": message.action.value}))
    elif svg is None:
        _print_text(lambda width: draw_text(shown, width))
    return 0


def _strategy_overrides(name: str) -> list[str]:
    """Return the overrides of a run for a strategy or a plan's preset; empty if it is neither."""
    from stretto.planner.presets import PLAN_PRESETS
    from stretto.strategies import STRATEGIES
    from stretto.studies.priced_run import parse_strategy_spec

    kind, colon, settings = name.partition(":")
    if kind in STRATEGIES:
        _, overrides = parse_strategy_spec(name)
        return [f"strategy.kind={kind}", *overrides]
    if kind in PLAN_PRESETS:
        _, overrides = parse_strategy_spec(f"sharded{colon}{settings}")
        return ["strategy.kind=sharded", f"strategy.plan={kind}", *overrides]
    return []


def _show_step(name: str, mesh: "Mesh", run: Path | None, *, svg: Path | None, json_: bool) -> int:
    from stretto.config import load
    from stretto.recipes import load_run
    from stretto.report.step_diagram import draw_step_svg, draw_step_text, make_step_diagram
    from stretto.run import RunConfig, program_of

    if mesh.size > MAX_RANKS_OF_STEP:
        raise ConfigError(f"{mesh.size} ranks: at most {MAX_RANKS_OF_STEP} for a strategy's step")
    overrides = _strategy_overrides(name)
    loaded = load(RunConfig, None, overrides) if run is None else load_run(run, overrides)
    diagram = make_step_diagram(program_of(loaded.config, mesh), name)
    if svg is not None:
        _write_svg(svg, draw_step_svg(diagram))
    if json_:
        for bar in diagram.bars:
            print(json.dumps(asdict(bar)))
    elif svg is None:
        _print_text(lambda width: draw_step_text(diagram, width))
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


def _mesh(flags: ShowFlags) -> "Mesh":
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


def _algorithms() -> "dict[str, Mapping[str, Algorithm]]":
    """Return the algorithms of each collective; torch is not imported."""
    from stretto.collectives.algorithms import (
        ALL_GATHER,
        ALLREDUCE,
        BROADCAST,
        HOST_ALL_GATHER,
        HOST_REDUCE_SCATTER,
        REDUCE_SCATTER,
    )

    return {
        "allreduce": ALLREDUCE,
        "reduce-scatter": REDUCE_SCATTER,
        "all-gather": ALL_GATHER,
        "broadcast": BROADCAST,
        "host-reduce-scatter": HOST_REDUCE_SCATTER,
        "host-all-gather": HOST_ALL_GATHER,
    }


def _schedule(algorithm: str, collective: str, mesh: "Mesh", parts: int) -> "Schedule":
    tables = _algorithms()
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


def _write_svg(svg: Path, drawing: str) -> None:
    from stretto.telemetry.sinks import write_atomically

    write_atomically(svg, drawing)
    print(f"stretto show: wrote {svg}", file=sys.stderr)


def _print_text(draw: "Callable[[int], Text]") -> None:
    from rich.console import Console

    console = Console()
    width = console.width if console.is_terminal else PIPE_WIDTH
    # The drawing is made for this width, so the console must not wrap it.
    console.print(draw(width), soft_wrap=True, highlight=False)

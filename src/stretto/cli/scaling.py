"""``stretto study workers|batch``: what is learned as workers or batches grow."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stretto.errors import ConfigError
from stretto.units import parse_fraction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.study.scaling.sweep import Cell, Done, Point


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What every study of accuracy may be told."""

    strategies: str = "allreduce,sgp,crossover"
    """What is compared; settings follow the word: crossover:groups=8:delay=1."""
    seeds: int = 3
    """Runs of each point at its best rate."""
    factors: str = "0.5,1,2"
    """Of the run's rate, tried at each point; the sweep goes on outwards while its edge is best."""
    jobs: int = 1
    """Runs at a time, each a process."""
    threads: int = 1
    """CPU threads of each."""
    lost: str = "0"
    """Share of gossip's messages that never arrive, as 1%; exact strategies wait for every one."""
    device: str = "cpu"
    """cpu, or cuda: what all workers do in a step is recorded once and played again."""
    out: Path = Path("study")
    """The folder of the study: an interrupted one goes on there; study.html tells it."""
    json: bool = False
    """One object a point on standard output."""


PLAIN = Asked()
How = Annotated[Asked, Parameter(name="*")]


def workers(run: Path, /, *overrides: str, workers: str = "8,16,32,64", how: How = PLAIN) -> int:
    """Accuracy by number of workers at a fixed batch, with virtual workers in one process.

    Example: stretto study workers examples/shapes.toml --workers 4,16 --out study

    Parameters
    ----------
    run
        A run file, or a recipe's name.
    overrides
        Settings of the run, as table.key=value.
    workers
        How many there are, in turn.
    """
    from stretto.recipes import load_run

    batch = load_run(run, overrides).config.train.batch
    points = [(count, batch) for count in _counts("--workers", workers)]
    return _study("workers", run, overrides, points, how)


def batch(
    run: Path,
    /,
    *overrides: str,
    batches: str = "1024,2048,4096,8192,16384",
    workers: int = 8,
    how: How = PLAIN,
) -> int:
    """Accuracy by batch at a fixed number of workers, with virtual workers in one process.

    Example: stretto study batch examples/shapes.toml --batches 64,256 --workers 4 --out study

    Parameters
    ----------
    run
        A run file, or a recipe's name.
    overrides
        Settings of the run, as table.key=value.
    batches
        Samples of a step over all workers, in turn.
    workers
        How many there are.
    """
    points = [(workers, count) for count in _counts("--batches", batches)]
    return _study("batch", run, overrides, points, how)


def _study(
    axis: str,
    run: Path,
    overrides: "Sequence[str]",
    points: "Sequence[tuple[int, int]]",
    how: Asked,
) -> int:
    from stretto.study.scaling.book import Book
    from stretto.study.scaling.campaign import Study, carry_out
    from stretto.study.scaling.cells import Basis
    from stretto.study.scaling.page import write_study_page
    from stretto.study.scaling.sweep import Point, Sweep

    for name in ("seeds", "jobs", "threads"):
        if getattr(how, name) < 1:
            raise ConfigError(f"--{name} {getattr(how, name)}: expected at least 1")
    words = [word.strip() for word in how.strategies.split(",")]
    wanted = tuple(Point(word, count, size) for word in words for count, size in points)
    lost = parse_fraction(how.lost)
    basis = Basis(str(run), tuple(overrides), how.threads, lost, how.device)
    planned = Study(basis, wanted, Sweep(_factors(how.factors), how.seeds))
    planned.check()
    book = Book(how.out, planned.about())
    page = how.out / "study.html"
    try:
        carry_out(planned, book, jobs=how.jobs, say=_say)
    finally:
        write_study_page(page, f"{run.stem}: accuracy against {axis}", axis, wanted, book.done)
    _print(wanted, book.done, as_json=how.json)
    _say(f"told in {page}")
    return 0


def _counts(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{name} {text}: expected numbers as 8,16,32")
    return [int(part) for part in parts]


def _factors(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or not 0 < found[0] <= found[-1] < float("inf"):
        raise ConfigError(f"--factors {text}: expected numbers above 0, as 0.5,1,2")
    return found


def _print(points: "Sequence[Point]", done: "Mapping[Cell, Done]", *, as_json: bool) -> None:
    from stretto.study.scaling.page import HEADERS, table_rows, to_json
    from stretto.study.scaling.sweep import summarise

    summaries = [one for point in points if (one := summarise(point, done)) is not None]
    if as_json:
        for one in summaries:
            print(json.dumps(to_json(one)))
        return
    rows = [list(HEADERS), *table_rows(summaries)]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    for name, *figures in rows:
        told = (figure.rjust(width) for figure, width in zip(figures, others, strict=True))
        print("  ".join([name.ljust(first), *told]))


def _say(line: str) -> None:
    print(f"stretto study: {line}", file=sys.stderr, flush=True)

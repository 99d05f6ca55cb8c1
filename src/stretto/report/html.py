"""Reports, plans and studies as self-contained HTML pages.

Security: names, notes and configs come from run files that anybody may have written, and must not
    be
able to run code in the page.

1. The template escapes everything that it prints.
2. Figures are JSON in a block that no browser executes, with every ``<`` encoded. Their labels are
   escaped once more for plotly, which interprets tags in labels.
3. The content security policy allows no network and exactly two scripts, named by their digests, so
   an injected script would not run.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from stretto.report.figures import PALETTE, Figure, figures, gantt_figure
from stretto.report.run_records import RunRecord, evaluations, last_end, last_start, logged_steps
from stretto.telemetry.event_text import strip_unprintable
from stretto.telemetry.sinks import write_atomically

ABSENT = "-"


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """The row of a run in the table of a report, as text that is not escaped for HTML yet."""

    name: str
    colour: str
    strategy: str
    workers: str
    steps: str
    loss: str
    accuracy: str
    samples_per_s: str
    seconds: str


def summary_row(run: RunRecord, index: int) -> SummaryRow:
    """Return the row of ``run``; ``index`` chooses its colour, as in the figures."""
    start, end = last_start(run), last_end(run)
    loss, samples_per_s, seconds = _final_metrics(run)
    return SummaryRow(
        name=strip_unprintable(run.name) or "(no name)",
        colour=PALETTE[index % len(PALETTE)],
        strategy=strip_unprintable(start.strategy) if start else ABSENT,
        workers=f"{start.workers:,}" if start else ABSENT,
        steps=_steps(run),
        loss=format_number(loss, ".4f"),
        accuracy=format_number(end.accuracy if end else _last_accuracy(run), ".1%"),
        samples_per_s=format_number(samples_per_s, ",.0f"),
        seconds=format_number(seconds, ",.1f"),
    )


def format_number(value: float | None, format_spec: str) -> str:
    """Return ``value`` as text; a missing, infinite or NaN value becomes words."""
    if value is None:
        return ABSENT
    if math.isnan(value):
        return "not a number"
    return format(value, format_spec) if math.isfinite(value) else "infinite"


def _final_metrics(run: RunRecord) -> tuple[float | None, float | None, float | None]:
    """Return (loss, samples per second, seconds) at the end of the run or at its last step."""
    end = last_end(run)
    if end is not None:
        return end.loss, end.samples_per_s, end.seconds
    logged = logged_steps(run)
    if not logged:
        return None, None, None
    last = logged[-1]
    return last.step.loss, last.step.samples_per_s, last.seconds


def _steps(run: RunRecord) -> str:
    start, end, logged = last_start(run), last_end(run), logged_steps(run)
    if end is not None:
        return f"{end.step:,}"
    reached = f"{logged[-1].step.step:,}" if logged else "0"
    return f"{reached} of {start.steps:,}, not finished" if start else ABSENT


def _last_accuracy(run: RunRecord) -> float | None:
    measured = evaluations(run)
    return measured[-1].accuracy if measured else None


@dataclass(frozen=True, slots=True)
class _Detail:
    """The facts and the config of one run, shown in a collapsed section below the figures."""

    name: str
    facts: Mapping[str, str]
    config_toml: str


def write_report(path: Path, title: str, verdict: str, runs: Sequence[RunRecord]) -> None:
    """Write the page of `render_report` to ``path`` atomically."""
    write_atomically(path, render_report(title, verdict, runs))


def render_report(title: str, verdict: str, runs: Sequence[RunRecord]) -> str:
    """Return the page: ``verdict`` first, then the table, the figures and the configs.

    Args:
        title: The heading of the page.
        verdict: The conclusion, in one sentence.
        runs: The runs to compare, in the order of the table. Each has one colour in all figures.
    """
    drawn = [
        *figures(runs),
        *(figure for figure in map(gantt_figure, runs) if figure is not None),
    ]
    plotly_js, page_js = plotly_script(), resource("report.js")
    return page_template("report.html.j2").render(
        title=strip_unprintable(title),
        verdict=strip_unprintable(verdict),
        policy=script_policy(plotly_js, page_js),
        style=Markup(resource("report.css")),  # trusted: part of the package
        scripts=[Markup(plotly_js), Markup(page_js)],
        rows=[asdict(summary_row(run, index)) for index, run in enumerate(runs)],
        figures=[(figure, figure_json(figure)) for figure in drawn],
        details=[_detail(run) for run in runs if run.facts or run.config_toml],
    )


def _detail(run: RunRecord) -> _Detail:
    facts = {strip_unprintable(key): strip_unprintable(value) for key, value in run.facts.items()}
    lines = (strip_unprintable(line) for line in run.config_toml.splitlines())
    return _Detail(strip_unprintable(run.name), facts, "\n".join(lines))


def figure_json(figure: Figure) -> Markup:
    """Return a figure as JSON that is safe inside a page, for the script that draws it."""
    value = {"data": figure.traces, "layout": figure.layout, "height": figure.height_px}
    text = json.dumps(_json_safe(value), allow_nan=False, separators=(",", ":"))
    # "<" could end the script block or open a comment. Its JSON escape means the same.
    return Markup(text.replace("<", "\\u003c"))


def _json_safe(value: Any) -> Any:  # noqa: ANN401 - any JSON value in, any JSON value out
    """Return ``value`` with null for NaN and infinity, which JSON lacks; plotly leaves a gap."""
    if isinstance(value, Mapping):
        return {key: _json_safe(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def script_policy(*scripts: str) -> str:
    """Return the content security policy that lets a page run only these scripts."""
    digests = " ".join(_digest(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


@cache
def _digest(script: str) -> str:
    sha256 = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(sha256).decode()}'"


@cache
def page_template(name: str) -> Template:
    """Return a page template; it escapes everything."""
    loader = PackageLoader("stretto.report", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(name)


@cache
def plotly_script() -> str:
    """Return the source of plotly.js."""
    from plotly.offline import get_plotlyjs  # the import takes half a second, so it is late

    return str(get_plotlyjs())


@cache
def resource(name: str) -> str:
    """Return the text of a file in the package's templates folder."""
    return (resources.files("stretto.report") / "templates" / name).read_text(encoding="utf-8")


# --- the pages of plans and studies: a verdict, figures and a table ---


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a caption that explains it to a newcomer."""

    title: str
    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Each row has a cell for every header."""


def render_page(
    kind: str, title: str, verdict: str, figures: Sequence[Figure], table: Table | None = None
) -> str:
    """Return one self-contained HTML page.

    Args:
        kind: What the page shows: "plan" or "study".
        title: The heading of the page.
        verdict: The conclusion, in one sentence.
        figures: The figures, in order.
        table: A table below the figures; left out if it has no rows.
    """
    plotly_js, page_js = plotly_script(), resource("report.js")
    printable_table = None
    if table is not None and table.rows:
        printable_table = Table(
            strip_unprintable(table.title),
            strip_unprintable(table.caption),
            [strip_unprintable(name) for name in table.headers],
            [[strip_unprintable(cell) for cell in row] for row in table.rows],
        )
    return page_template("page.html.j2").render(
        kind=kind,
        title=strip_unprintable(title),
        verdict=strip_unprintable(verdict),
        policy=script_policy(plotly_js, page_js),
        style=Markup(resource("report.css")),  # trusted: part of the package
        scripts=[Markup(plotly_js), Markup(page_js)],
        figures=[(figure, figure_json(figure)) for figure in figures],
        table=printable_table,
        classes=_cell_classes(printable_table.rows) if printable_table else [],
    )


def _cell_classes(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the CSS class of each column: "n" (right-aligned) for numbers, else none."""
    columns = list(zip(*rows, strict=True))
    return ["", *("n" if all(map(_is_number_cell, column)) else "" for column in columns[1:])]


def _is_number_cell(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("", "-")

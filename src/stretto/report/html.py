"""The report as one HTML page that needs nothing but itself.

Note: why nothing in a run can act in the page. Names, notes and configs come from run files that
anybody may have written. (1) The template escapes everything it prints. (2) Figures travel as JSON
in a block that no browser executes, with every ``<`` written as its code, and their labels are
escaped once more for plotly, which reads tags in labels. (3) The page's policy allows no network
and exactly two scripts, named by their digests: a script smuggled in would not be run.
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

from stretto.report.figures import Figure, figures
from stretto.report.gantt import gantt
from stretto.report.records import RunRecord
from stretto.report.summary import summary_row
from stretto.telemetry.aside import write_aside
from stretto.telemetry.wording import printable


@dataclass(frozen=True, slots=True)
class _Detail:
    """What is folded away below the figures, for one run."""

    name: str
    facts: Mapping[str, str]
    config_toml: str


def write_report(path: Path, title: str, verdict: str, runs: Sequence[RunRecord]) -> None:
    """Write `render_report` to ``path``, aside and renamed."""
    write_aside(path, render_report(title, verdict, runs))


def render_report(title: str, verdict: str, runs: Sequence[RunRecord]) -> str:
    """Return the page: ``verdict`` first, then the table, the figures and what was configured.

    Args:
        title: The heading of the page.
        verdict: What the reader should take away, in one sentence.
        runs: The runs to compare, in the order of the table; each keeps its colour throughout.
    """
    drawn = [*figures(runs), *(picture for picture in map(gantt, runs) if picture is not None)]
    plotly_js, page_js = drawing_script(), resource("report.js")
    return page_template("report.html.j2").render(
        title=printable(title),
        verdict=printable(verdict),
        policy=script_policy(plotly_js, page_js),
        style=Markup(resource("report.css")),  # ours, from the package
        scripts=[Markup(plotly_js), Markup(page_js)],
        rows=[asdict(summary_row(run, index)) for index, run in enumerate(runs)],
        figures=[(figure, figure_json(figure)) for figure in drawn],
        details=[_detail(run) for run in runs if run.facts or run.config_toml],
    )


def _detail(run: RunRecord) -> _Detail:
    facts = {printable(key): printable(value) for key, value in run.facts.items()}
    lines = (printable(line) for line in run.config_toml.splitlines())
    return _Detail(printable(run.name), facts, "\n".join(lines))


def figure_json(figure: Figure) -> Markup:
    """Return a figure for the script that draws it, safe inside a page."""
    value = {"data": figure.traces, "layout": figure.layout, "height": figure.height_px}
    text = json.dumps(_drawable(value), allow_nan=False, separators=(",", ":"))
    # "<" could end the block or open a comment in it; in a JSON string its code means the same.
    return Markup(text.replace("<", "\\u003c"))


def _drawable(value: Any) -> Any:  # noqa: ANN401 - any JSON value in, any JSON value out
    """Return ``value`` with null where plotly should leave a gap: JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: _drawable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_drawable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def script_policy(*scripts: str) -> str:
    """Return the rule by which a page runs these scripts and nothing else."""
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
    """Return the template of a page, in which everything is escaped."""
    loader = PackageLoader("stretto.report", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(name)


@cache
def drawing_script() -> str:
    """Return the library that draws figures."""
    from plotly.offline import get_plotlyjs  # late: the import alone takes half a second

    return str(get_plotlyjs())


@cache
def resource(name: str) -> str:
    """Return a file that pages are made of."""
    return (resources.files("stretto.report") / "templates" / name).read_text(encoding="utf-8")

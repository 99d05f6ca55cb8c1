"""A page with a verdict, figures and a table: what plans and studies are told as.

It is put together as that of a report (`stretto.report.html`), whose note says why nothing in a
name can act in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stretto.report.figures import Figure
from stretto.report.html import drawing_script, figure_json, page_template, resource, script_policy
from stretto.telemetry.wording import printable


@dataclass(frozen=True, slots=True)
class Table:
    """A table, with the sentence that lets a newcomer read it."""

    title: str
    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Each with a cell for every header."""


def render_page(
    kind: str, title: str, verdict: str, figures: Sequence[Figure], table: Table | None = None
) -> str:
    """Return one self-contained HTML page; ``kind`` is what of ours it is: "plan", "study"."""
    plotly_js, page_js = drawing_script(), resource("report.js")
    shown = None
    if table is not None and table.rows:
        shown = Table(
            printable(table.title),
            printable(table.caption),
            [printable(name) for name in table.headers],
            [[printable(cell) for cell in row] for row in table.rows],
        )
    return page_template("page.html.j2").render(
        kind=kind,
        title=printable(title),
        verdict=printable(verdict),
        policy=script_policy(plotly_js, page_js),
        style=Markup(resource("report.css")),  # ours, from the package
        scripts=[Markup(plotly_js), Markup(page_js)],
        figures=[(figure, figure_json(figure)) for figure in figures],
        table=shown,
        classes=_classes(shown.rows) if shown else [],
    )


def _classes(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return how each column is set: figures are read best from the right, names never are."""
    columns = list(zip(*rows, strict=True))
    return ["", *("n" if all(map(_is_figure, column)) else "" for column in columns[1:])]


def _is_figure(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("", "-")

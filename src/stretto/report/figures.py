"""The pictures of a report as plain plotly values: figures are data, the page draws them.

Colours are those of Okabe and Ito (2008), told apart by readers with any kind of colour vision;
lines differ by dash as well, so that a grey print can still be read.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from stretto.report.records import Moment, RunRecord, evaluations, moments
from stretto.telemetry.wording import printable

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
COMPUTE, COMMUNICATION, DATA, OTHER = "#0072B2", "#E69F00", "#CC79A7", "#999999"

_MOST_POINTS = 1000
_LONGEST_LABEL = 48
_FEWEST_TO_SMOOTH = 40
_SHARES: tuple[tuple[str, str, Callable[[Moment], float]], ...] = (
    ("compute", COMPUTE, lambda moment: moment.step.compute_share),
    ("exposed communication", COMMUNICATION, lambda moment: moment.step.comm_share),
    ("waiting for data", DATA, lambda moment: moment.step.data_share),
)

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with the one sentence that lets a newcomer read it."""

    title: str
    caption: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any]
    height_px: int = 380


def shown(text: str) -> str:
    """Return ``text`` for a plotly label, which would otherwise take tags and links in it as such.

    The page escapes once more on its way into HTML; this escape is for plotly's own reader. A long
    name is cut, lest the legend push the figure off the page.
    """
    clean = printable(text)
    cut = clean if len(clean) <= _LONGEST_LABEL else clean[: _LONGEST_LABEL - 3] + "..."
    return html.escape(cut)


def figures(runs: Sequence[RunRecord]) -> list[Figure]:
    """Return the pictures that compare ``runs``, leaving out those with nothing to show."""
    steps = [moments(run) for run in runs]
    drawn = (
        _loss_by_step(runs, steps),
        _loss_by_seconds(runs, steps),
        _accuracy(runs),
        _shares(runs, steps),
    )
    return [figure for figure in drawn if figure.traces]


def _loss_by_step(runs: Sequence[RunRecord], steps: Sequence[Sequence[Moment]]) -> Figure:
    return Figure(
        "Loss against steps",
        "How wrong the model still is after each update, lower is better: curves that lie on "
        "each other learn the same from the same number of updates.",
        _loss_traces(runs, steps, lambda moment: moment.step.step),
        {"xaxis": {"title": "step (one update of the model)"}, "yaxis": {"title": "loss"}},
    )


def _loss_by_seconds(runs: Sequence[RunRecord], steps: Sequence[Sequence[Moment]]) -> Figure:
    return Figure(
        "Loss against time",
        "The same loss over the clock on the wall: the curve that is lower and further to the "
        "left got there sooner.",
        _loss_traces(runs, steps, lambda moment: round(moment.seconds, 4)),
        {"xaxis": {"title": "seconds of running"}, "yaxis": {"title": "loss"}},
    )


def _loss_traces(
    runs: Sequence[RunRecord],
    steps: Sequence[Sequence[Moment]],
    position: Callable[[Moment], float],
) -> list[Trace]:
    traces: list[Trace] = []
    for index, (run, logged) in enumerate(zip(runs, steps, strict=True)):
        if not logged:
            continue
        where = [position(moment) for moment in logged]
        losses = [moment.step.loss for moment in logged]
        curve = {**line(index), "name": shown(run.name), "legendgroup": str(index)}
        if len(losses) >= _FEWEST_TO_SMOOTH:
            faint = {"opacity": 0.25, "showlegend": False, "hoverinfo": "skip"}
            traces.append({**curve, **faint, **_thinned(where, losses)})
            losses = running_mean(losses, window=max(3, len(losses) // 25))
        traces.append({**curve, **_thinned(where, losses)})
    return traces


def running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Return each value averaged with those around it; a value that is no number stays one.

    The window shrinks towards both ends, so that the curve begins and ends where the values do.
    """
    # Sums from the start make the cost of a mean independent of the window.
    sums = [0.0, *accumulate(value if math.isfinite(value) else 0.0 for value in values)]
    counts = [0, *accumulate(math.isfinite(value) for value in values)]
    means: list[float] = []
    for index, value in enumerate(values):
        reach = min(window // 2, index, len(values) - 1 - index)
        first, end = index - reach, index + reach + 1
        total, count = sums[end] - sums[first], counts[end] - counts[first]
        means.append(total / count if math.isfinite(value) else math.nan)
    return means


def _accuracy(runs: Sequence[RunRecord]) -> Figure:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        points = [each for each in evaluations(run) if each.accuracy is not None]
        if points:
            values = {"x": [each.step for each in points], "y": [each.accuracy for each in points]}
            look = {**line(index), "mode": "lines+markers", "marker": {"size": 7}}
            traces.append({**look, "name": shown(run.name), **values})
    return Figure(
        "Accuracy on unseen data",
        "The share of right answers on examples the model has not been trained on, measured now "
        "and then during training: higher is better.",
        traces,
        {
            "xaxis": {"title": "step (one update of the model)"},
            "yaxis": {"title": "right answers", "tickformat": ".0%"},
        },
    )


def _shares(runs: Sequence[RunRecord], steps: Sequence[Sequence[Moment]]) -> Figure:
    present = [(run, logged) for run, logged in zip(runs, steps, strict=True) if logged]
    # The position is a number and the name only its label: two runs of one name stay two bars.
    rows = list(range(len(present)))
    means = [[_mean(logged, share) for _, logged in present] for _, _, share in _SHARES]
    traces = [
        _share_bar(name, colour, rows, values)
        for (name, colour, _), values in zip(_SHARES, means, strict=True)
    ]
    rest = [max(0.0, 1.0 - sum(values)) for values in zip(*means, strict=True)]
    traces.append(_share_bar("other", OTHER, rows, rest))
    labels = [shown(run.name) for run, _ in present]
    return Figure(
        "Where the time of a step went",
        "A step spends its time computing, waiting for other workers (communication that "
        "computing did not hide), or waiting for data: the more of the bar is compute, the "
        "better the workers are used.",
        traces if present else [],
        {
            "barmode": "stack",
            "xaxis": {
                "title": "share of the step",
                "tickformat": ".0%",
                "range": [0, 1],
                "tickvals": [0, 0.25, 0.5, 0.75, 1],
            },
            "yaxis": {"tickvals": rows, "ticktext": labels, "autorange": "reversed"},
        },
        height_px=170 + 48 * len(rows),
    )


def _share_bar(name: str, colour: str, rows: list[int], values: list[float]) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "marker": {"color": colour},
        "y": rows,
        "x": [round(value, 4) for value in values],
        "width": 0.6,
        "hovertemplate": f"{name}: %{{x:.1%}}<extra></extra>",
    }


def _mean(logged: Sequence[Moment], share: Callable[[Moment], float]) -> float:
    finite = [value for value in map(share, logged) if math.isfinite(value)]
    return fmean(finite) if finite else 0.0


def line(index: int) -> Trace:
    """Return the look of the ``index``-th of several curves."""
    dash = DASHES[index % len(DASHES)]
    colour = PALETTE[index % len(PALETTE)]
    style = {"color": colour, "dash": dash, "width": 2.5}
    return {"type": "scatter", "mode": "lines", "line": style, "connectgaps": False}


def _thinned(where: Sequence[float], values: Sequence[float]) -> Trace:
    """Keep every k-th point and the last one: a long run should not make a heavy page."""
    stride = max(1, math.ceil(len(values) / _MOST_POINTS))
    kept = [*range(0, len(values) - 1, stride), len(values) - 1]
    return {"x": [where[i] for i in kept], "y": [values[i] for i in kept]}

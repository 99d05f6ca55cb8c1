"""The figures of a report as plotly data; the page draws them.

Colours are those of Okabe and Ito (2008), which all kinds of colour vision can distinguish. Lines
also differ by dash, so that a grey print can be read.
"""

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from stretto.report.run_records import LoggedStep, RunRecord, evaluations, logged_steps
from stretto.telemetry.event_text import strip_unprintable
from stretto.telemetry.timeline import Span, Timeline

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
COMPUTE, COMMUNICATION, DATA, OTHER = "#0072B2", "#E69F00", "#CC79A7", "#999999"

_MOST_POINTS = 1000
_LONGEST_LABEL = 48
_FEWEST_TO_SMOOTH = 40
_SHARES: tuple[tuple[str, str, Callable[[LoggedStep], float]], ...] = (
    ("compute", COMPUTE, lambda logged_step: logged_step.step.compute_share),
    ("exposed communication", COMMUNICATION, lambda logged_step: logged_step.step.comm_share),
    ("waiting for data", DATA, lambda logged_step: logged_step.step.data_share),
)

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A plotly figure with a caption that explains it to a newcomer."""

    title: str
    caption: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any]
    height_px: int = 380


def escape_label(text: str) -> str:
    """Return ``text`` escaped for a plotly label, because plotly interprets tags and links in it.

    The page is escaped separately. A long name is cut so that the legend leaves room for the
    figure.
    """
    clean = strip_unprintable(text)
    cut = clean if len(clean) <= _LONGEST_LABEL else clean[: _LONGEST_LABEL - 3] + "..."
    return html.escape(cut)


def figures(runs: Sequence[RunRecord]) -> list[Figure]:
    """Return the figures that compare ``runs``, without those that have no data."""
    steps = [logged_steps(run) for run in runs]
    drawn = (
        _loss_by_step(runs, steps),
        _loss_by_seconds(runs, steps),
        _accuracy(runs),
        _shares(runs, steps),
    )
    return [figure for figure in drawn if figure.traces]


def _loss_by_step(runs: Sequence[RunRecord], steps: Sequence[Sequence[LoggedStep]]) -> Figure:
    return Figure(
        "Loss against steps",
        "The loss of the model after each update, lower is better: runs whose curves coincide "
        "learn the same from the same number of updates.",
        _loss_traces(runs, steps, lambda logged_step: logged_step.step.step),
        {"xaxis": {"title": "step (one update of the model)"}, "yaxis": {"title": "loss"}},
    )


def _loss_by_seconds(runs: Sequence[RunRecord], steps: Sequence[Sequence[LoggedStep]]) -> Figure:
    return Figure(
        "Loss against time",
        "The same loss over wall-clock time: a curve that is lower and further to the left got "
        "there sooner.",
        _loss_traces(runs, steps, lambda logged_step: round(logged_step.seconds, 4)),
        {"xaxis": {"title": "seconds of running"}, "yaxis": {"title": "loss"}},
    )


def _loss_traces(
    runs: Sequence[RunRecord],
    steps: Sequence[Sequence[LoggedStep]],
    position: Callable[[LoggedStep], float],
) -> list[Trace]:
    traces: list[Trace] = []
    for index, (run, logged) in enumerate(zip(runs, steps, strict=True)):
        if not logged:
            continue
        positions = [position(logged_step) for logged_step in logged]
        losses = [logged_step.step.loss for logged_step in logged]
        curve = {**curve_style(index), "name": escape_label(run.name), "legendgroup": str(index)}
        if len(losses) >= _FEWEST_TO_SMOOTH:
            faint = {"opacity": 0.25, "showlegend": False, "hoverinfo": "skip"}
            traces.append({**curve, **faint, **_thin(positions, losses)})
            losses = running_mean(losses, window=max(3, len(losses) // 25))
        traces.append({**curve, **_thin(positions, losses)})
    return traces


def running_mean(values: Sequence[float], *, window: int) -> list[float]:
    """Return the centred moving average of ``values``; values that are not finite become NaN.

    The window shrinks towards both ends, so that the curve starts and ends at the true values.
    """
    # Prefix sums make the cost of a mean independent of the window.
    sums = [0.0, *accumulate(value if math.isfinite(value) else 0.0 for value in values)]
    counts = [0, *accumulate(math.isfinite(value) for value in values)]
    means: list[float] = []
    for index, value in enumerate(values):
        half_window = min(window // 2, index, len(values) - 1 - index)
        first, end = index - half_window, index + half_window + 1
        total, count = sums[end] - sums[first], counts[end] - counts[first]
        means.append(total / count if math.isfinite(value) else math.nan)
    return means


def _accuracy(runs: Sequence[RunRecord]) -> Figure:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        points = [each for each in evaluations(run) if each.accuracy is not None]
        if points:
            values = {"x": [each.step for each in points], "y": [each.accuracy for each in points]}
            look = {**curve_style(index), "mode": "lines+markers", "marker": {"size": 7}}
            traces.append({**look, "name": escape_label(run.name), **values})
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


def _shares(runs: Sequence[RunRecord], steps: Sequence[Sequence[LoggedStep]]) -> Figure:
    present = [(run, logged) for run, logged in zip(runs, steps, strict=True) if logged]
    # Bars have numeric positions with names as labels, so two runs of the same name stay two bars.
    rows = list(range(len(present)))
    means = [[_mean(logged, share) for _, logged in present] for _, _, share in _SHARES]
    traces = [
        _share_bar(name, colour, rows, values)
        for (name, colour, _), values in zip(_SHARES, means, strict=True)
    ]
    rest = [max(0.0, 1.0 - sum(values)) for values in zip(*means, strict=True)]
    traces.append(_share_bar("other", OTHER, rows, rest))
    labels = [escape_label(run.name) for run, _ in present]
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


def _mean(logged: Sequence[LoggedStep], share: Callable[[LoggedStep], float]) -> float:
    finite = [value for value in map(share, logged) if math.isfinite(value)]
    return fmean(finite) if finite else 0.0


def curve_style(index: int) -> Trace:
    """Return the plotly style of the ``index``-th of several curves."""
    dash = DASHES[index % len(DASHES)]
    colour = PALETTE[index % len(PALETTE)]
    style = {"color": colour, "dash": dash, "width": 2.5}
    return {"type": "scatter", "mode": "lines", "line": style, "connectgaps": False}


def _thin(positions: Sequence[float], values: Sequence[float]) -> Trace:
    """Keep every k-th point and the last one, so that a long run does not make a large page."""
    stride = max(1, math.ceil(len(values) / _MOST_POINTS))
    kept = [*range(0, len(values) - 1, stride), len(values) - 1]
    return {"x": [positions[i] for i in kept], "y": [values[i] for i in kept]}


# --- Gantt chart of a few steps: one row per rank and lane, one bar per span ---

_MOST_STEPS = 3
_MOST_RANKS = 8
_MOST_SPANS_A_RANK = 600
_LANE_COLOURS = (
    ("compute", (COMPUTE, "#56B4E9", "#009E73")),
    ("comm", (COMMUNICATION, "#D55E00", "#F0E442")),
    ("data", (DATA,)),
)
"""Colours by the prefix of a lane's name: cool ones for computation, warm ones for messages."""


def gantt_figure(run: RunRecord) -> Figure | None:
    """Return the Gantt chart of a few steps from the middle of ``run``; None if it has no spans.

    The first steps are slow (warm-up), and the last one may be incomplete.
    """
    steps = _steps_shown(run.timelines)
    rows = [row for row in (_excerpt(each, steps) for each in run.timelines) if row.spans]
    if not rows:
        return None
    start_times_s, clocks_differ = _start_times_s(rows)
    labels = _labels(rows[:_MOST_RANKS])
    return Figure(
        f"A few steps of {strip_unprintable(run.name)}",
        _caption(len(rows), clocks_differ),
        _traces(rows[:_MOST_RANKS], start_times_s, labels),
        {
            "barmode": "overlay",
            "xaxis": {"title": "milliseconds"},
            "yaxis": {
                "tickvals": list(range(len(labels))),
                "ticktext": [f"rank {rank} {escape_label(lane)}" for rank, lane in labels],
                "range": [len(labels) - 0.4, -0.6],
            },
        },
        height_px=150 + 30 * len(labels),
    )


def _steps_shown(timelines: Sequence[Timeline]) -> set[int]:
    """Return a few consecutive steps near the middle, if possible without an evaluation between.

    A long evaluation would compress the steps beside it into slivers.
    """
    spans = [span for timeline in timelines for span in timeline.spans]
    steps = sorted({span.step for span in spans if span.step >= 0})
    middle = max(0, (len(steps) - _MOST_STEPS + 1) // 2)
    for first in range(middle, min(len(steps), middle + 2 * _MOST_STEPS)):
        shown = set(steps[first : first + _MOST_STEPS])
        begin_s = min(span.start_s for span in spans if span.step in shown)
        end_s = max(span.end_s for span in spans if span.step in shown)
        if not any(s.step < 0 and begin_s < s.end_s and s.start_s < end_s for s in spans):
            return shown
    return set(steps[middle : middle + _MOST_STEPS]) or {-1}


def _excerpt(timeline: Timeline, steps: set[int]) -> Timeline:
    spans = sorted((s for s in timeline.spans if s.step in steps), key=lambda s: s.start_s)
    return Timeline(timeline.rank, tuple(spans[:_MOST_SPANS_A_RANK]))


def _start_times_s(rows: Sequence[Timeline]) -> tuple[dict[int, float], bool]:
    """Return the start time of each rank's rows, and whether ranks were aligned to start at zero.

    Ranks of one host share a clock, so their true offsets are kept. If the starts differ by more
    than the length of the excerpt, the clocks differ, and each rank starts at zero.
    """
    starts = {row.rank: min(span.start_s for span in row.spans) for row in rows}
    length_s = max(max(s.end_s for s in row.spans) - starts[row.rank] for row in rows)
    first_s = min(starts.values())
    if max(starts.values()) - first_s > length_s:
        return starts, True
    return dict.fromkeys(starts, first_s), False


def _labels(rows: Sequence[Timeline]) -> list[tuple[int, str]]:
    return [
        (row.rank, lane)
        for row in rows
        # Compute lanes come first in every rank, to compare them with the lanes below.
        for lane in sorted({s.lane for s in row.spans}, key=lambda lane: (_lane_family(lane), lane))
    ]


def _traces(
    rows: Sequence[Timeline], start_times_s: dict[int, float], labels: Sequence[tuple[int, str]]
) -> list[Trace]:
    rows_by_label = {label: row_index for row_index, label in enumerate(labels)}
    traces: dict[str, Trace] = {}
    colours = _colours([span for row in rows for span in row.spans])
    for row in rows:
        for span in row.spans:
            kind = _kind(span)
            trace = traces.setdefault(kind, _empty_trace(kind, colours[kind]))
            trace["base"].append(round((span.start_s - start_times_s[row.rank]) * 1e3, 4))
            trace["x"].append(round((span.end_s - span.start_s) * 1e3, 4))
            trace["y"].append(rows_by_label[row.rank, span.lane])
            trace["text"].append(escape_label(f"{span.name}, step {span.step}"))
    return list(traces.values())


def _empty_trace(kind: str, colour: str) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": escape_label(kind),
        "marker": {"color": colour, "line": {"width": 0.5, "color": "rgba(255,255,255,0.6)"}},
        "width": 0.8,
        "textposition": "none",
        "hovertemplate": "%{text}: %{x:.3g} ms<extra></extra>",
        "base": [],
        "x": [],
        "y": [],
        "text": [],
    }


def _colours(spans: Sequence[Span]) -> dict[str, str]:
    """Return a colour for every kind of span, in order of appearance; grey when they run out."""
    colours: dict[str, str] = {}
    left = [*(list(choice) for _, choice in _LANE_COLOURS), []]
    for span in spans:
        kind = _kind(span)
        if kind not in colours:
            choice = left[_lane_family(span.lane)]
            colours[kind] = choice.pop(0) if choice else OTHER
    return colours


def _lane_family(lane: str) -> int:
    begins = (lane.startswith(prefix) for prefix, _ in _LANE_COLOURS)
    return next(
        (row_index for row_index, is_match in enumerate(begins) if is_match), len(_LANE_COLOURS)
    )


def _kind(span: Span) -> str:
    """Return the span's name without its number: ``bucket 3`` and ``bucket 4`` are one kind."""
    return re.sub(r"[\s\[#_-]*\d+\]?\s*$", "", span.name) or span.name


def _caption(num_ranks: int, clocks_differ: bool) -> str:
    text = (
        "Each row shows one worker's computation or communication over time. A communication bar "
        "under a compute bar costs nothing; where it stands alone, the worker waits."
    )
    if num_ranks > _MOST_RANKS:
        text += f" Shown are the first {_MOST_RANKS} of {num_ranks} workers."
    if clocks_differ:
        text += " The workers' clocks differ, so each worker starts at zero."
    return text

"""A few steps of a run as a Gantt picture: a row per rank and lane, a bar per span."""

import re
from collections.abc import Sequence

from stretto.report.figures import COMMUNICATION, COMPUTE, DATA, OTHER, Figure, Trace, shown
from stretto.report.records import RunRecord
from stretto.telemetry.timeline import Span, Timeline
from stretto.telemetry.wording import printable

_MOST_STEPS = 3
_MOST_RANKS = 8
_MOST_SPANS_A_RANK = 600
_LANE_COLOURS = (
    ("compute", (COMPUTE, "#56B4E9", "#009E73")),
    ("comm", (COMMUNICATION, "#D55E00", "#F0E442")),
    ("data", (DATA,)),
)
"""By how a lane's name begins: cool colours compute, warm ones move data between ranks."""


def gantt(run: RunRecord) -> Figure | None:
    """Return the picture of two or three steps from the middle of ``run``, if it kept spans.

    The middle, because the first steps warm up and the last may stop short.
    """
    steps = _steps_shown(run.timelines)
    rows = [row for row in (_excerpt(each, steps) for each in run.timelines) if row.spans]
    if not rows:
        return None
    origins_s, aligned = _origins_s(rows)
    labels = _labels(rows[:_MOST_RANKS])
    return Figure(
        f"A few steps of {printable(run.name)}",
        _caption(len(rows), aligned),
        _traces(rows[:_MOST_RANKS], origins_s, labels),
        {
            "barmode": "overlay",
            "xaxis": {"title": "milliseconds"},
            "yaxis": {
                "tickvals": list(range(len(labels))),
                "ticktext": [f"rank {rank} {shown(lane)}" for rank, lane in labels],
                "range": [len(labels) - 0.4, -0.6],
            },
        },
        height_px=150 + 30 * len(labels),
    )


def _steps_shown(timelines: Sequence[Timeline]) -> set[int]:
    """Return a few neighbouring steps near the middle, if possible with nothing between them.

    An evaluation between two steps would squeeze both of them into slivers.
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


def _origins_s(rows: Sequence[Timeline]) -> tuple[dict[int, float], bool]:
    """Return where each rank's picture begins, and whether ranks had to be laid on each other.

    Ranks of one host share a clock and keep their true distances. Where the starts lie further
    apart than the excerpt is long, the clocks are not the same one, and each rank begins at zero.
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
        # Compute first in every rank: the eye compares it with the lanes below it.
        for lane in sorted({s.lane for s in row.spans}, key=lambda lane: (_family(lane), lane))
    ]


def _traces(
    rows: Sequence[Timeline], origins_s: dict[int, float], labels: Sequence[tuple[int, str]]
) -> list[Trace]:
    places = {label: place for place, label in enumerate(labels)}
    traces: dict[str, Trace] = {}
    colours = _colours([span for row in rows for span in row.spans])
    for row in rows:
        for span in row.spans:
            kind = _kind(span)
            trace = traces.setdefault(kind, _empty_trace(kind, colours[kind]))
            trace["base"].append(round((span.start_s - origins_s[row.rank]) * 1e3, 4))
            trace["x"].append(round((span.end_s - span.start_s) * 1e3, 4))
            trace["y"].append(places[row.rank, span.lane])
            trace["text"].append(shown(f"{span.name}, step {span.step}"))
    return list(traces.values())


def _empty_trace(kind: str, colour: str) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": shown(kind),
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
    """Give every kind of span a colour, in order of appearance; grey when they run out."""
    colours: dict[str, str] = {}
    left = [*(list(choice) for _, choice in _LANE_COLOURS), []]
    for span in spans:
        kind = _kind(span)
        if kind not in colours:
            choice = left[_family(span.lane)]
            colours[kind] = choice.pop(0) if choice else OTHER
    return colours


def _family(lane: str) -> int:
    begins = (lane.startswith(prefix) for prefix, _ in _LANE_COLOURS)
    return next((place for place, fits in enumerate(begins) if fits), len(_LANE_COLOURS))


def _kind(span: Span) -> str:
    """Return the name without its number: ``bucket 3`` and ``bucket 4`` are of one kind."""
    return re.sub(r"[\s\[#_-]*\d+\]?\s*$", "", span.name) or span.name


def _caption(num_ranks: int, aligned: bool) -> str:
    text = (
        "Each row is one worker's computing or communicating over time: where a communication "
        "bar lies under a compute bar it costs nothing, where it stands alone the worker waits."
    )
    if num_ranks > _MOST_RANKS:
        text += f" Shown are the first {_MOST_RANKS} of {num_ranks} workers."
    if aligned:
        text += " The workers' clocks differ, so each worker begins at zero."
    return text

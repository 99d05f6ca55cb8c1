"""The HTML page of a plan: the timeline of one step, memory by slot, and a table of units."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.planner.exact_timing import TimeInterval
from stretto.planner.memory import Footprints
from stretto.planner.plan import MessageKind, Plan, PlanMessage
from stretto.planner.profile import Profile
from stretto.planner.timing import StepTiming, time_plan
from stretto.report.figures import COMMUNICATION, COMPUTE, DATA, OTHER, Figure, Trace, escape_label
from stretto.report.html import Table, render_page
from stretto.telemetry.sinks import write_atomically
from stretto.units import format_bytes, format_s

_COMPUTE_COLOURS = {"backward": "#56B4E9", "update": "#009E73", "forward": COMPUTE}
_MESSAGE_COLOURS = {
    MessageKind.REDUCE: COMMUNICATION,
    MessageKind.UNSHARD: "#D55E00",
    MessageKind.UNSHARD_FOR_BACKWARD: DATA,
}
_MEMORY_COLOURS = (OTHER, "#D55E00", COMMUNICATION, COMPUTE)
"""Colours of the parts of memory, from the bottom of the stack."""
_MIN_SHARE = 1e-6
"""Bars shorter than this share of a step are not drawn."""
_MOST_TICKS = 24


@dataclass(frozen=True, slots=True)
class PlanPage:
    """The content of the page of a plan."""

    title: str
    summary_line: str
    """The conclusion, in one sentence."""
    profile: Profile
    plan: Plan
    memory_limit: int
    """Bytes."""
    headers: Sequence[str] = ()
    """The headers of the table of units."""
    rows: Sequence[Sequence[str]] = ()
    """The rows of the table of units; each has a cell for every header."""
    pareto: Sequence[tuple[int, float]] = ()
    """(memory limit in bytes, step time of the best plan in seconds) for several limits."""


def write_plan_page(path: Path, page: PlanPage) -> None:
    """Write the page of `render_plan_page` to ``path`` atomically."""
    write_atomically(path, render_plan_page(page))


def render_plan_page(page: PlanPage) -> str:
    """Return the page: summary, timeline of a step, memory, time against memory, units.

    Raises:
        ConfigError: The profile is of another model.
    """
    timed = time_plan(page.plan, page.profile)
    drawn = [timeline_figure(page.plan, timed), memory_figure(page)]
    if page.pareto:
        drawn.append(pareto_figure(page, timed.step_s))
    units = Table(
        "The units",
        "Each row is one unit: a part of the model that is unsharded, used and reduced as one. "
        "Units are in the order of forward.",
        page.headers,
        page.rows,
    )
    return render_page("plan", page.title, page.summary_line, drawn, units)


def timeline_figure(plan: Plan, timed: StepTiming) -> Figure:
    """Return the figure of one step: computation, and the messages of each kind."""
    kinds = [what for what in MessageKind if any(message.what is what for message in plan.messages)]
    traces = [*_compute_traces(plan, timed), _wait_trace(timed)]
    traces += [_message_trace(plan, timed, what, row) for row, what in enumerate(kinds, start=1)]
    rows = ["compute", *(what.value for what in kinds)]
    return Figure(
        "One step",
        f"A step takes {format_s(timed.step_s)}; computation waits for {format_s(timed.waited_s)} "
        "of it. Each row below computation is one kind of message: a bar under computation costs "
        "nothing. Steps follow each other without a gap: a bar that is cut off at the right "
        "continues at the left.",
        [trace for trace in traces if trace["x"]],
        {
            "barmode": "overlay",
            "xaxis": {"title": "milliseconds", "range": [0, timed.step_s * 1e3]},
            "yaxis": {
                "tickvals": list(range(len(rows))),
                "ticktext": rows,
                "range": [len(rows) - 0.4, -0.6],
            },
        },
        height_px=150 + 44 * len(rows),
    )


def _compute_traces(plan: Plan, timed: StepTiming) -> list[Trace]:
    traces = {name: _bars(name, colour) for name, colour in _COMPUTE_COLOURS.items()}
    slots = plan.slots
    for slot, interval in enumerate(timed.slots):
        if interval.end_s - interval.start_s <= _MIN_SHARE * timed.step_s:
            continue
        if slot == slots.update:
            _draw(traces["update"], 0, interval, "update")
            continue
        forward = slots.is_forward(slot)
        unit = slot - slots.units - 1 if forward else slots.units - 1 - slot
        label = f"{slots.name(slot)}, {escape_label(plan.units[unit].name)}"
        _draw(traces["forward" if forward else "backward"], 0, interval, label)
    return list(traces.values())


def _wait_trace(timed: StepTiming) -> Trace:
    """Return the hatched bars of the waits between slots."""
    trace = _bars("waits", "rgba(0,0,0,0)")
    trace["marker"]["pattern"] = {"shape": "/", "fgcolor": OTHER, "size": 6}
    ends = [0.0, *(slot.end_s for slot in timed.slots)]
    starts = [*(slot.start_s for slot in timed.slots), timed.step_s]
    for end_s, start_s in zip(ends, starts, strict=True):
        if start_s - end_s > _MIN_SHARE * timed.step_s:
            _draw(trace, 0, TimeInterval(end_s, start_s), "waits for messages")
    return trace


def _message_trace(plan: Plan, timed: StepTiming, what: MessageKind, row: int) -> Trace:
    trace = _bars(what.value, _MESSAGE_COLOURS[what])
    for message, interval in zip(plan.messages, timed.messages, strict=True):
        if message.what is what:
            for part in _wrap_into_step(interval, timed.step_s):
                _draw(trace, row, part, _describe_message(plan, message))
    return trace


def _describe_message(plan: Plan, message: PlanMessage) -> str:
    unit, slots = plan.units[message.unit], plan.slots
    window = f"from {slots.name(message.gate)} on, due at {slots.name(message.due)}"
    return f"{escape_label(unit.name)}, block {message.block + 1} of {len(unit.blocks)}, {window}"


def _wrap_into_step(interval: TimeInterval, step_s: float) -> Iterator[TimeInterval]:
    """Yield ``interval`` wrapped into the step that is drawn, in parts if it crosses its ends."""
    shortest = _MIN_SHARE * step_s
    for offset in (-1, 0, 1):
        start_s = max(0.0, interval.start_s + offset * step_s)
        end_s = min(step_s, interval.end_s + offset * step_s)
        if end_s - start_s > shortest:
            yield TimeInterval(start_s, end_s)


def _bars(name: str, colour: str) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "marker": {"color": colour, "line": {"width": 0.5, "color": "rgba(255,255,255,0.6)"}},
        "width": 0.8,
        "textposition": "none",
        "hovertemplate": f"{name} %{{text}}: %{{x:.3g}} ms<extra></extra>",
        "base": [],
        "x": [],
        "y": [],
        "text": [],
    }


def _draw(trace: Trace, row: int, interval: TimeInterval, label: str) -> None:
    trace["base"].append(round(interval.start_s * 1e3, 6))
    trace["x"].append(round((interval.end_s - interval.start_s) * 1e3, 6))
    trace["y"].append(row)
    trace["text"].append(label)


def memory_figure(page: PlanPage) -> Figure:
    """Return the figure of the most memory that a rank may keep in each slot, by its parts."""
    slots, footprints = page.plan.slots, Footprints(page.profile)
    curve = footprints.curve(page.plan)
    scale, unit = _scale(max(page.memory_limit, *curve))
    names = [slots.name(slot) for slot in range(slots.count)]
    parts = footprints.parts(page.plan).items()
    traces = [
        _stacked(name, colour, values, scale)
        for (name, values), colour in zip(parts, _MEMORY_COLOURS, strict=True)
    ]
    edges = [-0.5, slots.count - 0.5]
    traces.append(_limit("memory limit", edges, [page.memory_limit / scale] * 2))
    peak = max(range(slots.count), key=curve.__getitem__)
    ticks = list(range(0, slots.count, -(-slots.count // _MOST_TICKS)))
    return Figure(
        "Memory",
        "The most that a rank may keep in each slot of a step, however late its messages are: "
        "backward (b) from the last unit to the first, the update, forward (f). The peak is "
        f"{format_bytes(curve[peak])}, in {names[peak]}; the memory limit is "
        f"{format_bytes(page.memory_limit)}.",
        traces,
        {
            "barmode": "stack",
            "bargap": 0,
            "xaxis": {
                "title": "slot",
                "range": edges,
                "tickvals": ticks,
                "ticktext": [names[slot] for slot in ticks],
            },
            "yaxis": {"title": unit, "rangemode": "tozero"},
        },
    )


def _scale(num_bytes: float) -> tuple[float, str]:
    """Return the size and the name of the unit in which ``num_bytes`` are displayed."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
    return next((pair for pair in units if num_bytes >= pair[0]), (1.0, "bytes"))


def _stacked(name: str, colour: str, values: Sequence[int], scale: float) -> Trace:
    return {
        "type": "bar",
        "name": name,
        "marker": {"color": colour, "line": {"width": 0}},
        "x": list(range(len(values))),
        "y": [value / scale for value in values],
        "text": [format_bytes(value) for value in values],
        "textposition": "none",
        "hovertemplate": f"{name}: %{{text}}<extra></extra>",
    }


def _limit(name: str, x: Sequence[float], y: Sequence[float]) -> Trace:
    line = {"color": DATA, "dash": "dash", "width": 2.5}
    drawn = {"type": "scatter", "mode": "lines", "line": line, "name": name}
    return {**drawn, "x": list(x), "y": list(y), "hoverinfo": "name"}


def pareto_figure(page: PlanPage, step_s: float) -> Figure:
    """Return the figure of step time against memory: best plans for other limits, and this one."""
    points = sorted(page.pareto)
    peak = Footprints(page.profile).peak(page.plan)
    scale, unit = _scale(max(points[-1][0], page.memory_limit))
    steps_ms = [seconds * 1e3 for _, seconds in points]
    curve = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "best plans",
        # A plan for less memory also fits into more, hence the staircase shape.
        "line": {"color": COMPUTE, "width": 2.5, "shape": "hv"},
        "marker": {"size": 7},
        "x": [num_bytes / scale for num_bytes, _ in points],
        "y": steps_ms,
        "hovertemplate": f"%{{x:.4g}} {unit}: %{{y:.4g}} ms<extra></extra>",
    }
    here = {
        "type": "scatter",
        "mode": "markers",
        "name": "this plan",
        "marker": {"size": 13, "symbol": "star", "color": "#D55E00"},
        "x": [peak / scale],
        "y": [step_s * 1e3],
        "hovertemplate": f"%{{x:.4g}} {unit}: %{{y:.4g}} ms<extra>this plan</extra>",
    }
    ends = [min(*steps_ms, step_s * 1e3), max(*steps_ms, step_s * 1e3)]
    return Figure(
        "Time against memory",
        "The step time of the best plan for each memory limit of a rank: where the curve is "
        "steep, more memory is worth it.",
        [curve, _limit("memory limit", [page.memory_limit / scale] * 2, ends), here],
        {"xaxis": {"title": unit}, "yaxis": {"title": "milliseconds"}},
    )

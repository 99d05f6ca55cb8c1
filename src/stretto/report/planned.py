"""A plan as one HTML page for people: a step of it, its memory, its units.

`stretto.report.page` puts it together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.plan.clock import Stretch
from stretto.plan.footprint import Footprints
from stretto.plan.profile import Profile
from stretto.plan.timing import Timed, time_plan
from stretto.plan.value import Message, Plan, What
from stretto.report.figures import COMMUNICATION, COMPUTE, DATA, OTHER, Figure, Trace, shown
from stretto.report.page import Table, render_page
from stretto.telemetry.aside import write_aside
from stretto.units import format_bytes, format_s

_COMPUTED = {"backward": "#56B4E9", "update": "#009E73", "forward": COMPUTE}
_CARRIED = {What.REDUCE: COMMUNICATION, What.GATHER: "#D55E00", What.REGATHER: DATA}
_KEPT = (OTHER, "#D55E00", COMMUNICATION, COMPUTE)
"""Colours of what a plan keeps, from the bottom: parameters and gradients as on their way."""
_SHORTEST = 1e-6
"""What share of a step is drawn at all."""
_MOST_TICKS = 24


@dataclass(frozen=True, slots=True)
class PlanPage:
    """What the page of a plan is made of."""

    title: str
    verdict: str
    """What the reader should take away, in one sentence."""
    profile: Profile
    plan: Plan
    budget: int
    """Bytes."""
    headers: Sequence[str] = ()
    """Of the table of units."""
    rows: Sequence[Sequence[str]] = ()
    """Of the table of units, each with a cell for every header."""
    pareto: Sequence[tuple[int, float]] = ()
    """Bytes, and seconds of the best plan for so many."""


def write_plan_page(path: Path, page: PlanPage) -> None:
    """Write `render_plan_page` to ``path``, aside and renamed."""
    write_aside(path, render_plan_page(page))


def render_plan_page(page: PlanPage) -> str:
    """Return the page: verdict, time-line of a step, memory, time against memory, units.

    Raises:
        ConfigError: The profile is one of another model.
    """
    timed = time_plan(page.plan, page.profile)
    drawn = [timeline_figure(page.plan, timed), memory_figure(page)]
    if page.pareto:
        drawn.append(pareto_figure(page, timed.step_s))
    units = Table(
        "The units",
        "Each row is one unit, a stretch of the model that is gathered, used and reduced as one, "
        "in the order of forward.",
        page.headers,
        page.rows,
    )
    return render_page("plan", page.title, page.verdict, drawn, units)


def timeline_figure(plan: Plan, timed: Timed) -> Figure:
    """Return one step: what is computed, and the messages beside it."""
    sorts = [what for what in What if any(message.what is what for message in plan.messages)]
    traces = [*_computed(plan, timed), _waits(timed)]
    traces += [_carried(plan, timed, what, row) for row, what in enumerate(sorts, start=1)]
    rows = ["compute", *(what.value for what in sorts)]
    return Figure(
        "One step",
        f"A step takes {format_s(timed.step_s)}, in {format_s(timed.waited_s)} of which "
        "computation stands still. Each row below it is one sort of message: where a bar lies "
        "under computation it costs nothing. Steps follow each other without a gap: what is cut "
        "off at the right goes on at the left.",
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


def _computed(plan: Plan, timed: Timed) -> list[Trace]:
    traces = {name: _bars(name, colour) for name, colour in _COMPUTED.items()}
    slots = plan.slots
    for slot, stretch in enumerate(timed.slots):
        if stretch.end_s - stretch.start_s <= _SHORTEST * timed.step_s:
            continue
        if slot == slots.update:
            _draw(traces["update"], 0, stretch, "update")
            continue
        forward = slots.is_forward(slot)
        unit = slot - slots.units - 1 if forward else slots.units - 1 - slot
        label = f"{slots.name(slot)}, {shown(plan.units[unit].name)}"
        _draw(traces["forward" if forward else "backward"], 0, stretch, label)
    return list(traces.values())


def _waits(timed: Timed) -> Trace:
    """Return what lies between slots, hatched."""
    trace = _bars("waits", "rgba(0,0,0,0)")
    trace["marker"]["pattern"] = {"shape": "/", "fgcolor": OTHER, "size": 6}
    ends = [0.0, *(slot.end_s for slot in timed.slots)]
    starts = [*(slot.start_s for slot in timed.slots), timed.step_s]
    for end_s, start_s in zip(ends, starts, strict=True):
        if start_s - end_s > _SHORTEST * timed.step_s:
            _draw(trace, 0, Stretch(end_s, start_s), "waits for messages")
    return trace


def _carried(plan: Plan, timed: Timed, what: What, row: int) -> Trace:
    trace = _bars(what.value, _CARRIED[what])
    for message, stretch in zip(plan.messages, timed.messages, strict=True):
        if message.what is what:
            for piece in _in_one_step(stretch, timed.step_s):
                _draw(trace, row, piece, _told(plan, message))
    return trace


def _told(plan: Plan, message: Message) -> str:
    unit, slots = plan.units[message.unit], plan.slots
    window = f"from {slots.name(message.gate)} on, due at {slots.name(message.due)}"
    return f"{shown(unit.name)}, block {message.block + 1} of {len(unit.blocks)}, {window}"


def _in_one_step(stretch: Stretch, step_s: float) -> Iterator[Stretch]:
    """Yield the parts of ``stretch`` in the step that is drawn; what is outside comes round."""
    shortest = _SHORTEST * step_s
    for turn in (-1, 0, 1):
        start_s = max(0.0, stretch.start_s + turn * step_s)
        end_s = min(step_s, stretch.end_s + turn * step_s)
        if end_s - start_s > shortest:
            yield Stretch(start_s, end_s)


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


def _draw(trace: Trace, row: int, stretch: Stretch, label: str) -> None:
    trace["base"].append(round(stretch.start_s * 1e3, 6))
    trace["x"].append(round((stretch.end_s - stretch.start_s) * 1e3, 6))
    trace["y"].append(row)
    trace["text"].append(label)


def memory_figure(page: PlanPage) -> Figure:
    """Return what a rank may keep in each slot, by what it is, under the budget."""
    slots, footprints = page.plan.slots, Footprints(page.profile)
    curve = footprints.curve(page.plan)
    scale, unit = _scale(max(page.budget, *curve))
    names = [slots.name(slot) for slot in range(slots.count)]
    parts = footprints.parts(page.plan).items()
    traces = [
        _stacked(name, colour, values, scale)
        for (name, values), colour in zip(parts, _KEPT, strict=True)
    ]
    edges = [-0.5, slots.count - 0.5]
    traces.append(_limit("budget", edges, [page.budget / scale] * 2))
    peak = max(range(slots.count), key=curve.__getitem__)
    ticks = list(range(0, slots.count, -(-slots.count // _MOST_TICKS)))
    return Figure(
        "Memory",
        f"The most that a rank may keep in each slot of a step, however late its messages are: "
        f"backward (b) from the last unit to the first, the update, forward (f). The peak is "
        f"{format_bytes(curve[peak])}, in {names[peak]}; the budget {format_bytes(page.budget)}.",
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
    """Return the unit in which ``num_bytes`` are told, and its size."""
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
    """Return time against memory: the best plans for other budgets, and where this one is."""
    points = sorted(page.pareto)
    peak = Footprints(page.profile).peak(page.plan)
    scale, unit = _scale(max(points[-1][0], page.budget))
    steps_ms = [seconds * 1e3 for _, seconds in points]
    curve = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "best plans",
        # A plan for less memory is one for more, too.
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
        "What a step takes at best with so many bytes on every rank: where the curve is steep, "
        "more memory is worth it.",
        [curve, _limit("budget", [page.budget / scale] * 2, ends), here],
        {"xaxis": {"title": unit}, "yaxis": {"title": "milliseconds"}},
    )

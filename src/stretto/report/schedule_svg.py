"""Draw a schedule as a space-time diagram in SVG: ranks side by side, time downwards.

Colours show lanes, or actions if there is one lane. Copies are dashed, so that a grey print can be
read. The file is self-contained and follows the reader's light or dark mode.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from stretto.collectives.schedule import Action
from stretto.errors import ConfigError
from stretto.report.schedule_diagram import (
    Diagram,
    describe_message,
    excerpt_lengths,
    message_label,
    messages_by_step,
    sign_legend,
    totals,
)
from stretto.report.schedule_messages import ScheduleMessage
from stretto.report.schedule_style import COLOURS, STYLE
from stretto.telemetry.event_text import count_text

MOST_RANKS = 32
MOST_ARROWS = 1200
_LEFT, _RIGHT = 76, 28
_TITLE_TOP, _LINE = 34, 20
_ARROW_DROP = 44
"""Vertical extent of an arrow."""
_LANE_SPACING = 16
"""Vertical distance between the starts of two lanes' arrows in one step."""
_STEP_GAP = 12
_CHARACTER = 6.9
_NARROW = 70
"""Columns narrower than this show the rank's number without the word "rank"."""
_ARROW_END_GAP = 3.0
"""Distance between an arrow's head and the line it points at."""


@dataclass(frozen=True, slots=True)
class LabelBox:
    """A rectangle, given by its centre and half its width and height."""

    x: float
    y: float
    half_width: float
    half_height: float

    def overlap(self, other: "LabelBox") -> float:
        """Return the area that two boxes share."""
        wide = self.half_width + other.half_width - abs(self.x - other.x)
        high = self.half_height + other.half_height - abs(self.y - other.y)
        return max(0.0, wide) * max(0.0, high)


@dataclass(frozen=True, slots=True)
class Arrow:
    """The straight line of a message, from its send to its receive."""

    x0: float
    y0: float
    x1: float
    y1: float

    def point_at(self, fraction: float) -> tuple[float, float]:
        """Return the point that lies ``fraction`` of the way along."""
        return (
            self.x0 + fraction * (self.x1 - self.x0),
            self.y0 + fraction * (self.y1 - self.y0),
        )


def place_label(
    arrow: Arrow, near: float, size: tuple[float, float], occupied: Iterable[LabelBox]
) -> LabelBox:
    """Return the box for a label of ``size`` on ``arrow`` that overlaps ``occupied`` least.

    The preferred place is ``near`` pixels from the source along x, which shows who sends.
    """
    others = list(occupied)
    length = abs(arrow.x1 - arrow.x0)
    near_fraction = near / length
    candidates = (
        near_fraction,
        1 - near_fraction,
        0.5,
        2 * near_fraction,
        1 - 2 * near_fraction,
        0.25,
        0.75,
        0.4,
        0.6,
    )
    boxes = [
        LabelBox(*arrow.point_at(fraction), size[0] / 2, size[1] / 2)
        for fraction in candidates
        if 0 < fraction < 1
    ]
    return min(boxes, key=lambda box: sum(box.overlap(other) for other in others))


def draw_svg(chart: Diagram) -> str:
    """Return ``chart`` as a standalone SVG; with too many messages, the first and last steps.

    Raises:
        ConfigError: There are more than `MOST_RANKS` ranks.
    """
    if chart.mesh.size > MOST_RANKS:
        raise ConfigError(
            f"{chart.mesh.size:,} ranks are too many for one picture: use at most {MOST_RANKS}, "
            "or leave out --svg for a list"
        )
    sheet = _Sheet(chart)
    body = [*sheet.heading(), *sheet.drawing(), *sheet.footing()]
    return "\n".join([*_opening(chart, sheet), *body, "</svg>", ""])


def _opening(chart: Diagram, sheet: "_Sheet") -> Iterator[str]:
    size = f'width="{sheet.width:.0f}" height="{sheet.bottom:.0f}"'
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {sheet.width:.0f} {sheet.bottom:.0f}" role="img" aria-labelledby="title">'
    )
    yield f'<title id="title">{escape(chart.title)}</title>'
    yield f"<desc>{escape('; '.join(totals(chart)))}</desc>"
    yield f"<style>{STYLE}</style>"
    yield "<defs>"
    for colour in range(len(COLOURS)):
        yield (
            f'<marker id="head{colour}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path class="head c{colour}" d="M0 0.6 8 4 0 7.4 1.8 4z"/></marker>'
        )
    yield "</defs>"
    yield f'<rect class="page" width="{sheet.width:.0f}" height="{sheet.bottom:.0f}"/>'


@dataclass(frozen=True, slots=True)
class _StepBand:
    """The horizontal band of one step, or of the steps left out."""

    top: float
    height: float
    step: tuple[ScheduleMessage, ...]
    """Empty where steps are left out."""


class _Sheet:
    """Computes the position of everything and yields the SVG elements."""

    def __init__(self, chart: Diagram) -> None:
        self._chart = chart
        ranks, hosts = chart.mesh.size, chart.mesh.hosts
        column = max(58.0, min(124.0, 960.0 / ranks))
        self._host_gap = 0.3 * column if hosts > 1 else 0.0
        wide = column * ranks + self._host_gap * (hosts - 1)
        self.width = max(_LEFT + wide + _RIGHT, 720.0)
        first = _LEFT + (self.width - _LEFT - _RIGHT - wide) / 2 + column / 2
        self._x: list[float] = []
        for host in range(hosts):
            for rank in chart.mesh.ranks_on_host(host):
                self._x.append(first + rank * column + host * self._host_gap)
        self._column = column
        self._title = self._wrapped([chart.title], 9.2)
        self._note = self._wrapped([chart.note] if chart.note else [])
        self._totals = self._wrapped(totals(chart))
        lines = len(self._title) + len(self._note)
        self._top = _TITLE_TOP + lines * _LINE + (44 if hosts > 1 else 24)
        self._num_omitted, bands = _bands(chart, self._top + 26)
        self._bands = bands
        last = bands[-1].top + bands[-1].height if bands else self._top + 50
        self._ends = last + 10
        legend = len(sign_legend(chart)) + (len(chart.lanes) if len(chart.lanes) > 1 else 0)
        self._foot = self._ends + 42
        self.bottom = self._foot + (legend + len(self._totals)) * _LINE + (16 if legend else 4)

    def _wrapped(self, lines: Sequence[str], character: float = _CHARACTER) -> list[str]:
        columns = int((self.width - 2 * _RIGHT) / character)
        return [part for line in lines for part in textwrap.wrap(line, columns)]

    def heading(self) -> Iterator[str]:
        y = float(_TITLE_TOP)
        for line in self._title:
            yield _text("title", _RIGHT, y, line)
            y += _LINE
        for line in self._note:
            yield _text("quiet", _RIGHT, y, line)
            y += _LINE

    def drawing(self) -> Iterator[str]:
        for index, band in enumerate(self._bands):
            yield from self._step_background(index, band)
        yield from self._hosts()
        for rank, x in enumerate(self._x):
            yield from self._rank(rank, x)
        for band in self._bands:
            yield from self._messages(band) if band.step else self._gap(band)

    def _rank(self, rank: int, x: float) -> Iterator[str]:
        y = self._top
        narrow = self._column < _NARROW
        half = 15 if narrow else 28
        yield f'<line class="rank" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{self._ends:.1f}"/>'
        yield (
            f'<rect class="pill" x="{x - half:.1f}" y="{y - 13}" width="{2 * half}" height="22" '
            'rx="11"/>'
        )
        yield _text("name", x, y + 2, f"{rank}" if narrow else f"rank {rank}")
        if narrow and not rank:
            yield _text("quiet", _RIGHT + 8, y + 2, "rank")

    def _hosts(self) -> Iterator[str]:
        mesh = self._chart.mesh
        if mesh.hosts == 1:
            return
        for host in range(mesh.hosts):
            ranks = mesh.ranks_on_host(host)
            left = self._x[ranks.start] - self._column / 2 + 2
            right = self._x[ranks.stop - 1] + self._column / 2 - 2
            top = self._top - 40
            yield (
                f'<rect class="host" x="{left:.1f}" y="{top}" width="{right - left:.1f}" '
                f'height="{self._ends + 8 - top}" rx="10"/>'
            )
            yield _text("name quiet", (left + right) / 2, top + 17, f"host {host}")

    def _step_background(self, index: int, band: _StepBand) -> Iterator[str]:
        if not band.step:
            return
        if index % 2 == 0:
            yield (
                f'<rect class="band" x="{_RIGHT}" y="{band.top:.1f}" '
                f'width="{self.width - 2 * _RIGHT:.1f}" height="{band.height:.1f}" rx="4"/>'
            )
        middle = band.top + band.height / 2 + 4
        yield _text("quiet", _RIGHT + 8, middle, f"step {band.step[0].step}")

    def _gap(self, band: _StepBand) -> Iterator[str]:
        text = f"... {count_text(self._num_omitted, 'more step')} left out ..."
        yield _text("name halo quiet", self.width / 2, band.top + band.height / 2 + 4, text)

    def _messages(self, band: _StepBand) -> Iterator[str]:
        """Yield all arrows of a step, then their labels, so that no arrow covers a label."""
        arrows = self._arrows(band)
        occupied: list[LabelBox] = []
        for message, arrow in zip(band.step, arrows, strict=True):
            yield _arrow(arrow, self._colour(message), message)
        for message, arrow in zip(band.step, arrows, strict=True):
            label_text = message_label(message)
            size = (_CHARACTER * len(label_text) + 2, 12.0)
            box = place_label(arrow, 0.34 * self._column, size, occupied)
            occupied.append(box)
            yield _text(f"label halo c{self._colour(message)}", box.x, box.y + 4, label_text)

    def _colour(self, message: ScheduleMessage) -> int:
        return self._chart.colour_index(message) % len(COLOURS)

    def _arrows(self, band: _StepBand) -> list[Arrow]:
        arrows = []
        for message, offset in zip(band.step, _lane_offsets(band.step), strict=True):
            y = band.top + _STEP_GAP / 2 + _LANE_SPACING * offset
            x0, x1 = self._x[message.source], self._x[message.target]
            short = _ARROW_END_GAP if x1 > x0 else -_ARROW_END_GAP
            arrows.append(Arrow(x0, y, x1 - short, y + _ARROW_DROP))
        return arrows

    def footing(self) -> Iterator[str]:
        y = self._foot
        many_lanes = len(self._chart.lanes) > 1
        for action, meaning in sign_legend(self._chart):
            colour_index = None if many_lanes else (0 if action is Action.ADD else 1)
            yield from _legend_entry(y, meaning, colour_index, action is Action.COPY)
            y += _LINE
        for index, name in enumerate(self._chart.lanes.values() if many_lanes else ()):
            yield from _legend_entry(y, name, index % len(COLOURS), False)
            y += _LINE
        y += 8 if self._chart.messages else 0
        for line in self._totals:
            yield _text("quiet", _RIGHT, y, line)
            y += _LINE


def _bands(chart: Diagram, top: float) -> tuple[int, list[_StepBand]]:
    """Return how many steps are left out, and the bands of the steps shown."""
    listed = messages_by_step(chart)
    first, last = excerpt_lengths([len(step) for step in listed], MOST_ARROWS)
    num_omitted = len(listed) - first - last
    gap: list[list[ScheduleMessage]] = [[]] if num_omitted else []
    bands: list[_StepBand] = []
    for step in [*listed[:first], *gap, *listed[len(listed) - last :]]:
        height = _ARROW_DROP + _STEP_GAP + _LANE_SPACING * max(_lane_offsets(step), default=0)
        bands.append(_StepBand(top, height, tuple(step)))
        top += height
    return num_omitted, bands


def _lane_offsets(step: Sequence[ScheduleMessage]) -> list[int]:
    """Return the vertical offset of each message's start, so that no arrow hides another.

    The messages of a lane start together, below those of the lane before it. Messages of one lane
    with the same source and target start below each other.
    """
    offsets: list[int] = []
    base, occupied = 0, Counter[tuple[int, int]]()
    for index, message in enumerate(step):
        if index and message.lane != step[index - 1].lane:
            base += max(occupied.values())
            occupied.clear()
        route = (message.source, message.target)
        offsets.append(base + occupied[route])
        occupied[route] += 1
    return offsets


def _arrow(arrow: Arrow, colour_index: int, message: ScheduleMessage) -> str:
    style = "copy" if message.action is Action.COPY else "add"
    return (
        f'<g class="message"><title>{escape(describe_message(message))}</title>'
        f'<circle class="head c{colour_index}" cx="{arrow.x0:.1f}" cy="{arrow.y0:.1f}" r="2.6"/>'
        f'<line class="{style} c{colour_index}" x1="{arrow.x0:.1f}" y1="{arrow.y0:.1f}" '
        f'x2="{arrow.x1:.1f}" y2="{arrow.y1:.1f}" marker-end="url(#head{colour_index})"/></g>'
    )


def _legend_entry(y: float, meaning: str, colour_index: int | None, is_copy: bool) -> Iterator[str]:
    """Yield a line of the legend; its sample is grey if ``colour_index`` is None."""
    colour = "plain" if colour_index is None else f"c{colour_index}"
    style = "copy" if is_copy else "add"
    yield (
        f'<line class="{style} {colour}" x1="{_RIGHT}" x2="{_RIGHT + 34}" '
        f'y1="{y - 4:.1f}" y2="{y - 4:.1f}"/>'
    )
    yield _text("ink", _RIGHT + 44, y, meaning)


def _text(style: str, x: float, y: float, text: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'

"""A schedule as a space-time diagram in SVG: ranks side by side, time downwards.

Colours tell lanes apart, or actions where there is one lane; a dashed line is a copy, so that a
grey print can be read as well. The file stands alone and follows the reader's light or dark mode.
"""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from stretto.comm.schedule import Action
from stretto.errors import ConfigError
from stretto.report.drawing.diagram import (
    Diagram,
    excerpt,
    label,
    sentence,
    signs,
    steps,
)
from stretto.report.drawing.labels import Arrow, Box, place
from stretto.report.drawing.messages import Message
from stretto.report.drawing.style import COLOURS, STYLE
from stretto.report.drawing.totals import totals
from stretto.telemetry.wording import counted

MOST_RANKS = 32
MOST_ARROWS = 1200
_LEFT, _RIGHT = 76, 28
_TITLE_TOP, _LINE = 34, 20
_FALL = 44
"""How far an arrow comes down."""
_BESIDE = 16
"""How far below each other the lanes of one step leave."""
_PAUSE = 12
_CHARACTER = 6.9
_NARROW = 70
"""Columns below this width have no room for the word rank."""
_HEAD = 3.0
"""Where an arrow ends short of the line it points at."""


def draw_svg(shown: Diagram) -> str:
    """Return ``shown`` as a standalone SVG; of too many messages, the first and last steps.

    Raises:
        ConfigError: More ranks than can be told apart.
    """
    if shown.mesh.size > MOST_RANKS:
        raise ConfigError(
            f"{shown.mesh.size:,} ranks are too many for one picture: take at most {MOST_RANKS}, "
            "or leave out --svg for a list"
        )
    sheet = _Sheet(shown)
    body = [*sheet.heading(), *sheet.drawing(), *sheet.footing()]
    return "\n".join([*_opening(shown, sheet), *body, "</svg>", ""])


def _opening(shown: Diagram, sheet: "_Sheet") -> Iterator[str]:
    size = f'width="{sheet.width:.0f}" height="{sheet.bottom:.0f}"'
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {sheet.width:.0f} {sheet.bottom:.0f}" role="img" aria-labelledby="title">'
    )
    yield f'<title id="title">{escape(shown.title)}</title>'
    yield f"<desc>{escape('; '.join(totals(shown)))}</desc>"
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
class _Band:
    """The stretch of time of one step, or of those left out."""

    top: float
    height: float
    step: tuple[Message, ...]
    """Empty where steps are left out."""


class _Sheet:
    """Where everything stands."""

    def __init__(self, shown: Diagram) -> None:
        self._shown = shown
        ranks, hosts = shown.mesh.size, shown.mesh.hosts
        column = max(58.0, min(124.0, 960.0 / ranks))
        self._between = 0.3 * column if hosts > 1 else 0.0
        wide = column * ranks + self._between * (hosts - 1)
        self.width = max(_LEFT + wide + _RIGHT, 720.0)
        first = _LEFT + (self.width - _LEFT - _RIGHT - wide) / 2 + column / 2
        self._x: list[float] = []
        for host in range(hosts):
            for rank in shown.mesh.on_host(host):
                self._x.append(first + rank * column + host * self._between)
        self._column = column
        self._title = self._wrapped([shown.title], 9.2)
        self._note = self._wrapped([shown.note] if shown.note else [])
        self._said = self._wrapped(totals(shown))
        lines = len(self._title) + len(self._note)
        self._top = _TITLE_TOP + lines * _LINE + (44 if hosts > 1 else 24)
        self._left_out, bands = _bands(shown, self._top + 26)
        self._bands = bands
        last = bands[-1].top + bands[-1].height if bands else self._top + 50
        self._ends = last + 10
        legend = len(signs(shown)) + (len(shown.lanes) if len(shown.lanes) > 1 else 0)
        self._foot = self._ends + 42
        self.bottom = self._foot + (legend + len(self._said)) * _LINE + (16 if legend else 4)

    def _wrapped(self, lines: Sequence[str], character: float = _CHARACTER) -> list[str]:
        room = int((self.width - 2 * _RIGHT) / character)
        return [part for line in lines for part in textwrap.wrap(line, room)]

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
            yield from self._behind(index, band)
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
        mesh = self._shown.mesh
        if mesh.hosts == 1:
            return
        for host in range(mesh.hosts):
            ranks = mesh.on_host(host)
            left = self._x[ranks.start] - self._column / 2 + 2
            right = self._x[ranks.stop - 1] + self._column / 2 - 2
            top = self._top - 40
            yield (
                f'<rect class="host" x="{left:.1f}" y="{top}" width="{right - left:.1f}" '
                f'height="{self._ends + 8 - top}" rx="10"/>'
            )
            yield _text("name quiet", (left + right) / 2, top + 17, f"host {host}")

    def _behind(self, index: int, band: _Band) -> Iterator[str]:
        if not band.step:
            return
        if index % 2 == 0:
            yield (
                f'<rect class="band" x="{_RIGHT}" y="{band.top:.1f}" '
                f'width="{self.width - 2 * _RIGHT:.1f}" height="{band.height:.1f}" rx="4"/>'
            )
        middle = band.top + band.height / 2 + 4
        yield _text("quiet", _RIGHT + 8, middle, f"step {band.step[0].step}")

    def _gap(self, band: _Band) -> Iterator[str]:
        text = f"... {counted(self._left_out, 'more step')} left out ..."
        yield _text("name halo quiet", self.width / 2, band.top + band.height / 2 + 4, text)

    def _messages(self, band: _Band) -> Iterator[str]:
        """Yield all arrows of a step, then their labels, so that no arrow crosses out a label."""
        arrows = self._arrows(band)
        taken: list[Box] = []
        for message, arrow in zip(band.step, arrows, strict=True):
            yield _arrow(arrow, self._colour(message), message)
        for message, arrow in zip(band.step, arrows, strict=True):
            said = label(message)
            size = (_CHARACTER * len(said) + 2, 12.0)
            box = place(arrow, 0.34 * self._column, size, taken)
            taken.append(box)
            yield _text(f"label halo c{self._colour(message)}", box.x, box.y + 4, said)

    def _colour(self, message: Message) -> int:
        return self._shown.kind(message) % len(COLOURS)

    def _arrows(self, band: _Band) -> list[Arrow]:
        arrows = []
        for message, below in zip(band.step, _places(band.step), strict=True):
            y = band.top + _PAUSE / 2 + _BESIDE * below
            x0, x1 = self._x[message.source], self._x[message.target]
            short = _HEAD if x1 > x0 else -_HEAD
            arrows.append(Arrow(x0, y, x1 - short, y + _FALL))
        return arrows

    def footing(self) -> Iterator[str]:
        y = self._foot
        many_lanes = len(self._shown.lanes) > 1
        for action, meaning in signs(self._shown):
            kind = None if many_lanes else (0 if action is Action.ADD else 1)
            yield from _key(y, meaning, kind, action is Action.COPY)
            y += _LINE
        for index, name in enumerate(self._shown.lanes.values() if many_lanes else ()):
            yield from _key(y, name, index % len(COLOURS), False)
            y += _LINE
        y += 8 if self._shown.messages else 0
        for line in self._said:
            yield _text("quiet", _RIGHT, y, line)
            y += _LINE


def _bands(shown: Diagram, top: float) -> tuple[int, list[_Band]]:
    """Return how many steps are left out, and where those shown stand."""
    listed = steps(shown)
    first, last = excerpt([len(step) for step in listed], MOST_ARROWS)
    left_out = len(listed) - first - last
    gap: list[list[Message]] = [[]] if left_out else []
    bands: list[_Band] = []
    for step in [*listed[:first], *gap, *listed[len(listed) - last :]]:
        height = _FALL + _PAUSE + _BESIDE * max(_places(step), default=0)
        bands.append(_Band(top, height, tuple(step)))
        top += height
    return left_out, bands


def _places(step: Sequence[Message]) -> list[int]:
    """Return how many places down each message leaves, so that none hides another.

    A lane's messages leave together, below those of the lane before it; several on one way and
    one lane leave below each other.
    """
    places: list[int] = []
    before, taken = 0, Counter[tuple[int, int]]()
    for index, message in enumerate(step):
        if index and message.lane != step[index - 1].lane:
            before += max(taken.values())
            taken.clear()
        way = (message.source, message.target)
        places.append(before + taken[way])
        taken[way] += 1
    return places


def _arrow(arrow: Arrow, kind: int, message: Message) -> str:
    style = "copy" if message.action is Action.COPY else "add"
    return (
        f'<g class="message"><title>{escape(sentence(message))}</title>'
        f'<circle class="head c{kind}" cx="{arrow.x0:.1f}" cy="{arrow.y0:.1f}" r="2.6"/>'
        f'<line class="{style} c{kind}" x1="{arrow.x0:.1f}" y1="{arrow.y0:.1f}" '
        f'x2="{arrow.x1:.1f}" y2="{arrow.y1:.1f}" marker-end="url(#head{kind})"/></g>'
    )


def _key(y: float, meaning: str, kind: int | None, is_copy: bool) -> Iterator[str]:
    """Yield a line of the legend; without a kind its sample is grey."""
    colour = "plain" if kind is None else f"c{kind}"
    style = "copy" if is_copy else "add"
    yield (
        f'<line class="{style} {colour}" x1="{_RIGHT}" x2="{_RIGHT + 34}" '
        f'y1="{y - 4:.1f}" y2="{y - 4:.1f}"/>'
    )
    yield _text("ink", _RIGHT + 44, y, meaning)


def _text(style: str, x: float, y: float, text: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'

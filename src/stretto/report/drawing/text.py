"""A schedule for a terminal: ranks side by side, time downwards, an arrow for every message."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from stretto.report.drawing.diagram import Diagram, excerpt, label, signs, steps
from stretto.report.drawing.messages import Message
from stretto.report.drawing.totals import totals
from stretto.telemetry.wording import counted

COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")
_MOST_ROWS = 60
_MOST_ROWS_OF_LISTS = 20
_MOST_LISTED = 8
_MARGIN = 8
_MARGIN_WITH_LANE = 15
_ARROW = 4
"""What an arrow needs besides its label: a dash, a blank on either side, a head."""


def draw_text(shown: Diagram, width: int) -> Text:
    """Return the drawing in lines of at most ``width``; a list of messages where none fits.

    Colours tell lanes apart, or actions where there is one lane; without colours it says as much.
    """
    lines = [Text(shown.title, "bold")]
    lines += [Text(shown.note)] if shown.note else []
    lines.append(Text())
    if shown.messages:
        grid = _Grid.fitting(shown, width)
        if grid:
            lines += [*grid.heading(), *_shortened(grid.blocks(), _MOST_ROWS)]
        else:
            listed = [_listed(shown, step, width) for step in steps(shown)]
            lines += _shortened(listed, _MOST_ROWS_OF_LISTS)
        lines += [Text(), *_legend(shown), Text()]
    lines += [Text(said) for said in totals(shown)]
    return Text("\n").join(lines)


def _shortened(blocks: Sequence[Sequence[Text]], most_rows: int) -> Iterator[Text]:
    """Leave out steps from the middle where there are too many."""
    first, last = excerpt([len(block) for block in blocks], most_rows)
    for block in blocks[:first]:
        yield from block
    left_out = len(blocks) - first - last
    if left_out:
        yield Text(f"... {counted(left_out, 'more step')} ...", "dim")
    for block in blocks[len(blocks) - last :]:
        yield from block


class _Grid:
    """Columns of ranks with arrows between them."""

    def __init__(self, shown: Diagram, gap: int) -> None:
        self._shown = shown
        self._gap = gap
        self._many_lanes = len(shown.lanes) > 1
        self._margin = _MARGIN_WITH_LANE if self._many_lanes else _MARGIN

    @classmethod
    def fitting(cls, shown: Diagram, width: int) -> "_Grid | None":
        """Return the grid with the columns as far apart as their labels need, if it fits."""
        widest = max(len(label(message)) for message in shown.messages)
        grid = cls(shown, max(widest + _ARROW + 2, len(f"rank {shown.mesh.size}") + 1))
        return grid if grid._column(shown.mesh.size - 1) + 4 <= width else None

    def heading(self) -> list[Text]:
        """Return the names of ranks and, where there are several, of hosts."""
        mesh = self._shown.mesh
        names = {self._column(rank) - 2: f"rank {rank}" for rank in range(mesh.size)}
        lines = [_row({0: "step", **({7: "lane"} if self._many_lanes else {}), **names})]
        if mesh.hosts > 1:
            hosts = {
                self._column(mesh.on_host(host).start) - 2: f"host {host}"
                for host in range(mesh.hosts)
            }
            lines.insert(0, _row(hosts))
        return [Text(line, "bold") for line in lines]

    def blocks(self) -> list[list[Text]]:
        """Return the lines of each step."""
        return [self._step(step) for step in steps(self._shown)]

    def _step(self, step: Sequence[Message]) -> list[Text]:
        lines: list[Text] = []
        for lane in dict.fromkeys(message.lane for message in step):
            mine = [message for message in step if message.lane == lane]
            for index, row in enumerate(_side_by_side(mine)):
                margin = {0: f"{step[0].step:>4}"} if not lines else {}
                if self._many_lanes and not index:
                    margin[7] = f"{lane:>4}"
                lines.append(self._line(_row(margin), row))
        lines.append(self._line("", []))
        return lines

    def _line(self, margin: str, row: Sequence[Message]) -> Text:
        ranks = range(self._shown.mesh.size)
        cells = list(_row({0: margin, **{self._column(rank): "|" for rank in ranks}}))
        spans = []
        for message in row:
            left, right = sorted((self._column(message.source), self._column(message.target)))
            arrow = f" {label(message)} ".center(right - left - 2, "-")
            forward = message.source < message.target
            cells[left + 1 : right] = f"{arrow}>" if forward else f"<{arrow}"
            spans.append((COLOURS[self._shown.kind(message) % len(COLOURS)], left + 1, right))
        line = Text("".join(cells))
        for colour, left, right in spans:
            line.stylize(colour, left, right)
        return line

    def _column(self, rank: int) -> int:
        return self._margin + 2 + rank * (self._gap + 1)


def _side_by_side(messages: Sequence[Message]) -> list[list[Message]]:
    """Put arrows that do not cross into one row, short ones first."""
    rows: list[list[Message]] = []
    for message in sorted(messages, key=lambda m: (abs(m.source - m.target), m.source)):
        free = (row for row in rows if not any(_overlap(message, other) for other in row))
        row = next(free, None)
        if row is None:
            rows.append([message])
        else:
            row.append(message)
    return rows


def _overlap(one: Message, other: Message) -> bool:
    begins = max(min(one.source, one.target), min(other.source, other.target))
    return begins < min(max(one.source, one.target), max(other.source, other.target))


def _row(pieces: dict[int, str]) -> str:
    """Return a line with each piece at its place."""
    line = ""
    for place in sorted(pieces):
        line = line.ljust(place) + pieces[place]
    return line


def _listed(shown: Diagram, step: Sequence[Message], width: int) -> list[Text]:
    """Return a step as a list: the first messages of each lane, and how many there are."""
    lines: list[Text] = []
    for lane in dict.fromkeys(message.lane for message in step):
        mine = [message for message in step if message.lane == lane]
        where = f", lane {lane}" if len(shown.lanes) > 1 else ""
        lines.append(Text(f"step {step[0].step}{where}: {counted(len(mine), 'message')}"))
        lines.append(_first_messages(shown, mine, width))
    return lines


def _first_messages(shown: Diagram, mine: Sequence[Message], width: int) -> Text:
    line = Text("   ")
    ending = f"  ... {len(mine):,} more"
    for index, message in enumerate(mine):
        text = f"  {message.source} -> {message.target} {label(message)}"
        is_last = index == len(mine) - 1
        room = width - len(line) - (0 if is_last else len(ending))
        if index and (index == _MOST_LISTED or len(text) > room):
            return line.append(f"  ... {len(mine) - index:,} more", "dim")
        line.append(text, COLOURS[shown.kind(message) % len(COLOURS)])
    return line


def _legend(shown: Diagram) -> list[Text]:
    lines = [Text(meaning) for _, meaning in signs(shown)]
    if len(shown.lanes) > 1:
        lines += [
            Text(name, COLOURS[index % len(COLOURS)])
            for index, name in enumerate(shown.lanes.values())
        ]
    return lines

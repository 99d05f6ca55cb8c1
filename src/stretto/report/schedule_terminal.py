"""Draw a schedule as text: ranks side by side, time downwards, an arrow for every message."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from stretto.report.schedule_diagram import (
    Diagram,
    excerpt_lengths,
    message_label,
    messages_by_step,
    sign_legend,
    totals,
)
from stretto.report.schedule_messages import ScheduleMessage
from stretto.telemetry.event_text import count_text

COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")
_MOST_ROWS = 60
_MOST_ROWS_OF_LISTS = 20
_MOST_LISTED = 8
_MARGIN = 8
_MARGIN_WITH_LANE = 15
_ARROW = 4
"""Characters of an arrow besides its label: a dash, a blank on either side, a head."""


def draw_text(chart: Diagram, width: int) -> Text:
    """Return the drawing in lines of at most ``width`` characters, or a list if it does not fit.

    Colours show lanes, or actions if there is one lane. The text is complete without colours.
    """
    lines = [Text(chart.title, "bold")]
    lines += [Text(chart.note)] if chart.note else []
    lines.append(Text())
    if chart.messages:
        grid = _Grid.fit(chart, width)
        if grid:
            lines += [*grid.heading(), *_omit_middle(grid.blocks(), _MOST_ROWS)]
        else:
            listed = [_list_step(chart, step, width) for step in messages_by_step(chart)]
            lines += _omit_middle(listed, _MOST_ROWS_OF_LISTS)
        lines += [Text(), *_legend(chart), Text()]
    lines += [Text(sentence) for sentence in totals(chart)]
    return Text("\n").join(lines)


def _omit_middle(blocks: Sequence[Sequence[Text]], most_rows: int) -> Iterator[Text]:
    """Yield the lines of ``blocks``; if there are too many, without the middle ones."""
    first, last = excerpt_lengths([len(block) for block in blocks], most_rows)
    for block in blocks[:first]:
        yield from block
    num_omitted = len(blocks) - first - last
    if num_omitted:
        yield Text(f"... {count_text(num_omitted, 'more step')} ...", "dim")
    for block in blocks[len(blocks) - last :]:
        yield from block


class _Grid:
    """Columns of ranks with arrows between them."""

    def __init__(self, chart: Diagram, gap: int) -> None:
        self._chart = chart
        self._gap = gap
        self._many_lanes = len(chart.lanes) > 1
        self._margin = _MARGIN_WITH_LANE if self._many_lanes else _MARGIN

    @classmethod
    def fit(cls, chart: Diagram, width: int) -> "_Grid | None":
        """Return the grid with columns as wide as the labels need; None if it does not fit."""
        widest = max(len(message_label(message)) for message in chart.messages)
        grid = cls(chart, max(widest + _ARROW + 2, len(f"rank {chart.mesh.size}") + 1))
        return grid if grid._column(chart.mesh.size - 1) + 4 <= width else None

    def heading(self) -> list[Text]:
        """Return the heading lines: the ranks and, if there are several, the hosts."""
        mesh = self._chart.mesh
        names = {self._column(rank) - 2: f"rank {rank}" for rank in range(mesh.size)}
        lines = [_row({0: "step", **({7: "lane"} if self._many_lanes else {}), **names})]
        if mesh.hosts > 1:
            hosts = {
                self._column(mesh.ranks_on_host(host).start) - 2: f"host {host}"
                for host in range(mesh.hosts)
            }
            lines.insert(0, _row(hosts))
        return [Text(line, "bold") for line in lines]

    def blocks(self) -> list[list[Text]]:
        """Return the lines of each step."""
        return [self._step(step) for step in messages_by_step(self._chart)]

    def _step(self, step: Sequence[ScheduleMessage]) -> list[Text]:
        lines: list[Text] = []
        for lane in dict.fromkeys(message.lane for message in step):
            lane_messages = [message for message in step if message.lane == lane]
            for index, row in enumerate(_pack_rows(lane_messages)):
                margin = {0: f"{step[0].step:>4}"} if not lines else {}
                if self._many_lanes and not index:
                    margin[7] = f"{lane:>4}"
                lines.append(self._line(_row(margin), row))
        lines.append(self._line("", []))
        return lines

    def _line(self, margin: str, row: Sequence[ScheduleMessage]) -> Text:
        ranks = range(self._chart.mesh.size)
        cells = list(_row({0: margin, **{self._column(rank): "|" for rank in ranks}}))
        spans = []
        for message in row:
            left, right = sorted((self._column(message.source), self._column(message.target)))
            arrow = f" {message_label(message)} ".center(right - left - 2, "-")
            forward = message.source < message.target
            cells[left + 1 : right] = f"{arrow}>" if forward else f"<{arrow}"
            spans.append(
                (COLOURS[self._chart.colour_index(message) % len(COLOURS)], left + 1, right)
            )
        line = Text("".join(cells))
        for colour, left, right in spans:
            line.stylize(colour, left, right)
        return line

    def _column(self, rank: int) -> int:
        return self._margin + 2 + rank * (self._gap + 1)


def _pack_rows(messages: Sequence[ScheduleMessage]) -> list[list[ScheduleMessage]]:
    """Put arrows that do not overlap into one row, short ones first."""
    rows: list[list[ScheduleMessage]] = []
    for message in sorted(messages, key=lambda m: (abs(m.source - m.target), m.source)):
        free = (row for row in rows if not any(_overlap(message, other) for other in row))
        row = next(free, None)
        if row is None:
            rows.append([message])
        else:
            row.append(message)
    return rows


def _overlap(one: ScheduleMessage, other: ScheduleMessage) -> bool:
    begins = max(min(one.source, one.target), min(other.source, other.target))
    return begins < min(max(one.source, one.target), max(other.source, other.target))


def _row(texts_by_column: dict[int, str]) -> str:
    """Return a line with each text at its column."""
    line = ""
    for column in sorted(texts_by_column):
        line = line.ljust(column) + texts_by_column[column]
    return line


def _list_step(chart: Diagram, step: Sequence[ScheduleMessage], width: int) -> list[Text]:
    """Return a step as a list: the number of messages of each lane, and the first ones."""
    lines: list[Text] = []
    for lane in dict.fromkeys(message.lane for message in step):
        lane_messages = [message for message in step if message.lane == lane]
        where = f", lane {lane}" if len(chart.lanes) > 1 else ""
        lines.append(
            Text(f"step {step[0].step}{where}: {count_text(len(lane_messages), 'message')}")
        )
        lines.append(_first_messages(chart, lane_messages, width))
    return lines


def _first_messages(chart: Diagram, lane_messages: Sequence[ScheduleMessage], width: int) -> Text:
    line = Text("   ")
    ending = f"  ... {len(lane_messages):,} more"
    for index, message in enumerate(lane_messages):
        text = f"  {message.source} -> {message.target} {message_label(message)}"
        is_last = index == len(lane_messages) - 1
        free_width = width - len(line) - (0 if is_last else len(ending))
        if index and (index == _MOST_LISTED or len(text) > free_width):
            return line.append(f"  ... {len(lane_messages) - index:,} more", "dim")
        line.append(text, COLOURS[chart.colour_index(message) % len(COLOURS)])
    return line


def _legend(chart: Diagram) -> list[Text]:
    lines = [Text(meaning) for _, meaning in sign_legend(chart)]
    if len(chart.lanes) > 1:
        lines += [
            Text(name, COLOURS[index % len(COLOURS)])
            for index, name in enumerate(chart.lanes.values())
        ]
    return lines

"""Draw a step program: the computation of a rank in one row, and its operations in rows below.

A bar begins where an operation may start (its gate) and ends where the main thread waits for it
(its due). Computation under a bar can hide the communication. The drawing repeats: a bar that
leaves on the right enters on the left, because every step begins where the one before ended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich.text import Text

from stretto.program.messages import lanes_of, messages_of
from stretto.program.step_program import ALL, Moment, Operation, Phase, StepProgram, Updates
from stretto.report.schedule_style import COLOURS, STYLE
from stretto.telemetry.event_text import count_text
from stretto.units import format_bytes

MOST_ROWS = 48
"""More operations than this are not drawn; the rest is counted."""
_SIGNS = ("[", "=", "]", "|")
_LABEL_WIDTH = 44
_SLOT_WIDTH, _ROW_HEIGHT, _LEFT, _TOP = 64, 22, 330, 78


@dataclass(frozen=True, slots=True)
class OperationBar:
    """An operation with its window, counted in slots from the start of backward."""

    label: str
    queue: int
    gate: float
    due: float
    """It may be beyond the last slot: in a later step."""


@dataclass(frozen=True, slots=True)
class StepDiagram:
    """A step as rows: slots of computation, and bars of operations."""

    title: str
    slots: tuple[str, ...]
    bars: tuple[OperationBar, ...]
    totals: tuple[str, ...]
    """Sentences below the drawing."""


def make_step_diagram(program: StepProgram, name: str) -> StepDiagram:
    """Return the drawing of the first step of ``program`` that communicates."""
    busy = [step for step in program.steps() if program.leaving(step)]
    step = busy[0] if busy else program.first_step
    operations = program.leaving(step)
    units = sorted({block.unit for block in program.blocks})
    slots = [*(f"B{unit}" for unit in reversed(units)), "update", *(f"F{unit}" for unit in units)]
    axis = _Axis(program, units)
    bars = [
        OperationBar(
            _label(program, one), one.queue, axis.position(one.gate), axis.position(one.due)
        )
        for one in operations
    ]
    period = "" if program.period == 1 else f", one of {count_text(program.period, 'step')}"
    title = f"{name}, {count_text(program.mesh.size, 'rank')}: step {step + 1}{period}"
    return StepDiagram(
        title, tuple(slots), tuple(bars), tuple(_totals(program, operations, bars, axis))
    )


class _Axis:
    """The moments of a step on an axis of slots: backward of each unit, update, forward."""

    def __init__(self, program: StepProgram, units: Sequence[int]) -> None:
        self._program = program
        self._rank_of_unit = {unit: number for number, unit in enumerate(units)}
        self._units = len(units)
        self.length = 2 * self._units + 1

    def position(self, moment: Moment) -> float:
        """Return the position of a moment, in slots since the start of backward."""
        return self._in_step(moment) + moment.later * self.length

    def _in_step(self, moment: Moment) -> float:
        phase, update = moment.phase, self._units
        if moment.block == ALL:
            positions = {Phase.BACKWARD: 0, Phase.GRADIENT: update, Phase.UPDATE: update}
            return positions.get(phase, update + 1)
        unit = self._rank_of_unit[self._program.blocks[moment.block].unit]
        if phase is Phase.FORWARD:
            return update + 1 + unit
        if phase is Phase.BACKWARD:
            return update - 1 - unit
        if phase is Phase.GRADIENT or self._program.updates is Updates.IN_BACKWARD:
            return update - unit
        before = self._units - 1 - unit + (phase is Phase.UPDATED)
        return update + before / self._units


def _label(program: StepProgram, operation: Operation) -> str:
    block = "" if operation.block == ALL else f" {operation.block}"
    sent = sum(message.num_bytes for message in messages_of(operation, 0, program.mesh.size))
    lanes = [lane for lane in lanes_of(operation, program.mesh.size) if lane >= 0]
    where = f"lane {', '.join(map(str, lanes))}" if lanes else "back end"
    what = f"{operation.kind.value} {operation.source.value}{block}"
    return f"{what:<24} {where:<9} {format_bytes(sent):>8}"


def _totals(
    program: StepProgram,
    operations: Sequence[Operation],
    bars: Sequence[OperationBar],
    axis: _Axis,
) -> Iterator[str]:
    if not operations:
        yield "no communication"
        return
    size = program.mesh.size
    sent = sum(m.num_bytes for one in operations for m in messages_of(one, 0, size))
    overlapping = sum(bar.due > bar.gate for bar in bars)
    yield (
        f"{count_text(len(operations), 'operation')}; rank 0 sends {format_bytes(sent)} in this "
        f"step; {overlapping} of them can overlap computation"
    )
    late = max(0.0, max(bar.due for bar in bars) - axis.length)
    if late:
        yield f"the last one is due {late / axis.length:.2g} steps after this one"
    yield "[ may start from here   ] the rank waits here until it is done   | starts and waits here"


# --- as text ---


def draw_step_text(diagram: StepDiagram, width: int) -> Text:
    """Return the drawing in lines of about ``width`` characters."""
    cell = max(3, min(9, (width - _LABEL_WIDTH) // len(diagram.slots)))
    head = "".join(slot[:cell].center(cell) for slot in diagram.slots)
    lines = [Text(diagram.title, "bold"), Text(), Text(" " * _LABEL_WIDTH + head, "bold")]
    for bar in diagram.bars[:MOST_ROWS]:
        lines.append(Text(f"{bar.label:<{_LABEL_WIDTH}}") + Text(_bar_text(bar, diagram, cell)))
    if len(diagram.bars) > MOST_ROWS:
        lines.append(Text(f"... and {len(diagram.bars) - MOST_ROWS} more"))
    return Text("\n").join([*lines, Text(), *(Text(sentence) for sentence in diagram.totals)])


def _bar_text(bar: OperationBar, diagram: StepDiagram, cell: int) -> str:
    length = len(diagram.slots) * cell
    start, end = round(bar.gate * cell), round(bar.due * cell)
    opens, fills, closes, at_once = _SIGNS
    row = [" "] * (length + 1)
    if start == end:
        row[start % (length + 1)] = at_once
        return "".join(row)
    for column in range(start, end):
        row[column % length] = fills
    row[length if end == length else end % length] = closes
    row[start % length] = opens
    return "".join(row)


# --- as SVG ---


def draw_step_svg(diagram: StepDiagram) -> str:
    """Return the drawing as a self-contained SVG file that follows light and dark mode."""
    bars = diagram.bars[:MOST_ROWS]
    width = _LEFT + len(diagram.slots) * _SLOT_WIDTH + 30
    height = _TOP + (len(bars) + 2 + len(diagram.totals)) * _ROW_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(diagram.title)}">',
        f"<style>{STYLE}{_bar_style()}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="title" x="16" y="30">{escape(diagram.title)}</text>',
        *_svg_slots(diagram, height),
    ]
    for row, bar in enumerate(bars):
        parts += _svg_bar(bar, row, len(diagram.slots))
    below = _TOP + (len(bars) + 1) * _ROW_HEIGHT
    rest = len(diagram.bars) - len(bars)
    sentences = [*([f"... and {rest} more"] if rest else []), *diagram.totals[:-1]]
    sentences.append("A bar begins where an operation may start and ends where the rank waits.")
    for number, sentence in enumerate(sentences):
        y = below + number * _ROW_HEIGHT
        parts.append(f'<text class="quiet" x="16" y="{y}">{escape(sentence)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar_style() -> str:
    rules = [f"rect.c{index}{{fill:{light}}}" for index, (light, _) in enumerate(COLOURS)]
    dark = "".join(f"rect.c{index}{{fill:{dark}}}" for index, (_, dark) in enumerate(COLOURS))
    return "".join(rules) + f"@media (prefers-color-scheme:dark){{{dark}}}"


def _svg_slots(diagram: StepDiagram, height: int) -> Iterator[str]:
    for number, slot in enumerate(diagram.slots):
        x = _LEFT + number * _SLOT_WIDTH
        if number % 2 == 0:
            yield (
                f'<rect class="band" x="{x}" y="{_TOP - 30}" width="{_SLOT_WIDTH}" '
                f'height="{height - _TOP + 10}"/>'
            )
        centre = x + _SLOT_WIDTH / 2
        yield f'<text class="name" x="{centre:g}" y="{_TOP - 14}">{escape(slot)}</text>'


def _svg_bar(bar: OperationBar, row: int, slots: int) -> Iterator[str]:
    y = _TOP + row * _ROW_HEIGHT
    label = " ".join(bar.label.split())
    yield f'<text x="16" y="{y + 11}">{escape(label)}</text>'
    for start, end in _pieces(bar, slots):
        x, wide = _LEFT + start * _SLOT_WIDTH, max(3.0, (end - start) * _SLOT_WIDTH)
        yield (
            f'<rect class="c{bar.queue % len(COLOURS)}" x="{x:g}" y="{y}" width="{wide:g}" '
            f'height="{_ROW_HEIGHT - 8}" rx="2"><title>{escape(label)}</title></rect>'
        )


def _pieces(bar: OperationBar, slots: int) -> Iterator[tuple[float, float]]:
    """Yield the parts of a bar inside the step: what leaves on the right enters on the left."""
    start, end = bar.gate, bar.due
    while end > slots:
        yield start, float(slots)
        start, end = 0.0, end - slots
    yield start, end

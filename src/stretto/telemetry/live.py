"""A live terminal display of the run: progress, speed, and the time shares of a step."""

import math
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.telemetry import event_text as wording
from stretto.telemetry.events import (
    CheckpointSaved,
    DataRead,
    EvalDone,
    Event,
    RunEnded,
    RunStarted,
    StepDone,
    StepSkipped,
)
from stretto.telemetry.sinks import PlainLines, Sink

_SECONDS_BETWEEN_REDRAWS = 0.1
_BAR_WIDTH = 40
_SHARE_STYLES = (("compute", "on blue"), ("communication", "on yellow"), ("data", "on magenta"))


def console_sink(stream: TextIO) -> Sink:
    """Return a live display if ``stream`` is a terminal that can redraw lines, else plain lines."""
    console = Console(file=stream)
    if stream.isatty() and not console.is_dumb_terminal:
        return LiveProgress(console)
    return PlainLines(stream)


class LiveProgress:
    """Redraws a few lines in place when events arrive; it has no thread of its own."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last_draw_s = -math.inf
        self._live: Live | None = None
        self._run: RunStarted | None = None
        self._step: StepDone | None = None
        self._status_lines: dict[str, str] = {}

    def __call__(self, event: Event) -> None:
        """Show ``event``; the first and last event of a run stay as lines above the display."""
        match event:
            case RunStarted():
                self._begin(event)
            case StepDone():
                self._step = event
                self._draw_if_due()
            case EvalDone():
                self._status_lines["last evaluation"] = wording.evaluation_text(event)
                self._draw()
            case StepSkipped():
                self._status_lines["last step left out"] = wording.skipped_step_text(event)
                self._draw()
            case DataRead():
                self._status_lines["data"] = wording.data_read_text(event)
                self._draw()
            case CheckpointSaved():
                self._status_lines["last checkpoint"] = wording.checkpoint_text(event)
                self._draw()
            case RunEnded():
                self._print_event(event)
                self.close()

    def close(self) -> None:
        """Draw the last state, restore the cursor and leave the display on the screen."""
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        """Return the current display; it changes no state."""
        rows: list[RenderableType] = []
        if self._run is not None:
            rows.append(_progress_row(self._run, self._step))
        if self._step is not None:
            rows += [Text(wording.speed_text(self._step)), _share_bar(self._step)]
        rows += [Text(f"{name}: {status}") for name, status in self._status_lines.items()]
        return Group(*rows)

    def _begin(self, event: RunStarted) -> None:
        self.close()
        self._run, self._step, self._status_lines = event, None, {}
        self._print_event(event)
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()
        self._draw()

    def _print_event(self, event: Event) -> None:
        # Text, not str: rich would read square brackets in a string as its own markup.
        self._console.print(Text(wording.event_line(event)))

    def _draw_if_due(self) -> None:
        if self._clock() - self._last_draw_s >= _SECONDS_BETWEEN_REDRAWS:
            self._draw()

    def _draw(self) -> None:
        if self._live is not None:
            self._last_draw_s = self._clock()
            self._live.update(self.render(), refresh=True)


def _progress_row(run: RunStarted, step: StepDone | None) -> RenderableType:
    done = 0 if step is None else step.step
    time_left = "" if step is None else f"{wording.duration_text(step.time_left_s)} left"
    row = Table.grid(padding=(0, 1))
    row.add_row(
        Text(wording.strip_unprintable(run.run), style="bold", overflow="ellipsis", no_wrap=True),
        ProgressBar(total=max(run.steps, 1), completed=done, width=_BAR_WIDTH),
        Text(wording.progress_text(done, run.steps)),
        Text(time_left, style="bold"),
    )
    return row


def _share_bar(step: StepDone) -> Text:
    """Return the time shares of a step as a coloured bar, followed by a legend in percent."""
    strip = Text()
    fractions = (step.compute_share, step.comm_share, step.data_share)
    for (_, style), fraction in zip(_SHARE_STYLES, fractions, strict=True):
        strip.append(" " * _share_cells(fraction), style=style)
    strip.append(" " * max(0, _BAR_WIDTH - len(strip)), style="on bright_black")
    for (name, style), fraction in zip(_SHARE_STYLES, fractions, strict=True):
        strip.append("  ").append(" ", style=style).append(
            f" {name} {wording.percent_text(fraction)}"
        )
    return strip


def _share_cells(fraction: float) -> int:
    # With 0.0 as its first argument, max() returns 0 for NaN: an unmeasured share has no cells.
    return round(min(1.0, max(0.0, fraction)) * _BAR_WIDTH)

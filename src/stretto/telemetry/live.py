"""A live picture of the run for a terminal: progress, speed, and where the time of a step goes."""

import math
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.telemetry import wording
from stretto.telemetry.events import (
    CheckpointSaved,
    DataRead,
    EvalDone,
    Event,
    RunEnded,
    RunStarted,
    StepDone,
    StepLeftOut,
)
from stretto.telemetry.sinks import PlainLines, Sink

_SECONDS_BETWEEN_PICTURES = 0.1
_SHARE_WIDTH = 40
_SHARE_STYLES = (("compute", "on blue"), ("communication", "on yellow"), ("data", "on magenta"))


def console_sink(stream: TextIO) -> Sink:
    """Return a live picture where ``stream`` is a terminal that can draw, plain lines elsewhere."""
    console = Console(file=stream)
    if stream.isatty() and not console.is_dumb_terminal:
        return LiveProgress(console)
    return PlainLines(stream)


class LiveProgress:
    """Redraws a few lines in place as events come; no thread of its own, so it costs no core."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._drawn_s = -math.inf
        self._live: Live | None = None
        self._run: RunStarted | None = None
        self._step: StepDone | None = None
        self._remarks: dict[str, str] = {}

    def __call__(self, event: Event) -> None:
        """Take ``event`` into the picture; the first and the last of a run stay as lines above."""
        match event:
            case RunStarted():
                self._begin(event)
            case StepDone():
                self._step = event
                self._draw_if_due()
            case EvalDone():
                self._remarks["last evaluation"] = wording.evaluation(event)
                self._draw()
            case StepLeftOut():
                self._remarks["last step left out"] = wording.left_out(event)
                self._draw()
            case DataRead():
                self._remarks["data"] = wording.reading(event)
                self._draw()
            case CheckpointSaved():
                self._remarks["last checkpoint"] = wording.checkpoint(event)
                self._draw()
            case RunEnded():
                self._say(event)
                self.close()

    def close(self) -> None:
        """Draw the last state, give the cursor back and leave the picture where it stands."""
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = None

    def picture(self) -> RenderableType:
        """Return what is to be seen now; pure but for the state it shows."""
        rows: list[RenderableType] = []
        if self._run is not None:
            rows.append(_bar(self._run, self._step))
        if self._step is not None:
            rows += [Text(wording.speed(self._step)), _share_bar(self._step)]
        rows += [Text(f"{name}: {remark}") for name, remark in self._remarks.items()]
        return Group(*rows)

    def _begin(self, event: RunStarted) -> None:
        self.close()
        self._run, self._step, self._remarks = event, None, {}
        self._say(event)
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()
        self._draw()

    def _say(self, event: Event) -> None:
        # Text, not str: rich would read square brackets in a string as its own markup.
        self._console.print(Text(wording.line(event)))

    def _draw_if_due(self) -> None:
        if self._clock() - self._drawn_s >= _SECONDS_BETWEEN_PICTURES:
            self._draw()

    def _draw(self) -> None:
        if self._live is not None:
            self._drawn_s = self._clock()
            self._live.update(self.picture(), refresh=True)


def _bar(run: RunStarted, step: StepDone | None) -> RenderableType:
    done = 0 if step is None else step.step
    left = "" if step is None else f"{wording.duration(step.time_left_s)} left"
    row = Table.grid(padding=(0, 1))
    row.add_row(
        Text(wording.printable(run.run), style="bold", overflow="ellipsis", no_wrap=True),
        ProgressBar(total=max(run.steps, 1), completed=done, width=_SHARE_WIDTH),
        Text(wording.progress(done, run.steps)),
        Text(left, style="bold"),
    )
    return row


def _share_bar(step: StepDone) -> Text:
    """Draw the step as a strip of coloured blanks, then say the same in words."""
    strip = Text()
    fractions = (step.compute_share, step.comm_share, step.data_share)
    for (_, style), fraction in zip(_SHARE_STYLES, fractions, strict=True):
        strip.append(" " * _cells(fraction), style=style)
    strip.append(" " * max(0, _SHARE_WIDTH - len(strip)), style="on bright_black")
    for (name, style), fraction in zip(_SHARE_STYLES, fractions, strict=True):
        strip.append("  ").append(" ", style=style).append(f" {name} {wording.percent(fraction)}")
    return strip


def _cells(fraction: float) -> int:
    # In this order max() answers 0 for NaN, so a share nobody measured takes no room.
    return round(min(1.0, max(0.0, fraction)) * _SHARE_WIDTH)

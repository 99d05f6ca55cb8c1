"""The live display for a terminal, and when plain lines are used instead."""

import io
import math

import pytest
from rich.console import Console

from stretto.telemetry.events import CheckpointSaved, EvalDone, RunEnded, RunStarted, StepDone
from stretto.telemetry.live import LiveProgress, console_sink
from stretto.telemetry.sinks import PlainLines

START = RunStarted("shapes", 4, 4, "allreduce", 400, "cnn", 1000, 1, "")
STEP = StepDone(120, 1, 0.8123, 0.05, 1204.0, 0.04, 0.75, 0.2, 0.05, 72.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal_console():
    return Console(
        file=Terminal(), force_terminal=True, width=120, color_system="truecolor", _environ={}
    )


def display_text(*events):
    """Return the display after ``events`` as text without colours."""
    console = terminal_console()
    live = LiveProgress(console, clock=lambda: 0.0)
    for event in events:
        live(event)
    paper = Console(file=io.StringIO(), width=120, color_system=None, _environ={})
    paper.print(live.render())
    live.close()
    return paper.file.getvalue()


@pytest.mark.parametrize(
    "fact", ["shapes", "120/400", "1 min 12 s left", "loss 0.8123", "1,204 samples/s"]
)
def test_the_display_shows_progress_and_speed(fact):
    assert fact in display_text(START, STEP)


@pytest.mark.parametrize("share", ["compute 75%", "communication 20%", "data 5%"])
def test_the_display_shows_the_time_shares(share):
    assert share in display_text(START, STEP)


def test_the_display_shows_the_last_evaluation():
    text = display_text(START, EvalDone(50, 0, 0.9, 0.5), EvalDone(100, 1, 0.7, 0.831))
    assert "last evaluation: step 100, loss 0.7000, accuracy 83.1%" in text
    assert "step 50" not in text


def test_the_display_shows_the_last_checkpoint():
    assert "last checkpoint: step 100, 2 MB" in display_text(
        START, CheckpointSaved(100, "runs/a", 2_000_000, 0.5)
    )


def test_nan_and_infinity_do_not_break_the_display():
    broken = StepDone(1, 0, math.nan, 0.1, math.nan, 0.1, math.nan, math.inf, -1.0, math.inf)
    assert "unknown left" in display_text(START, broken)


@pytest.mark.parametrize(("share", "cells"), [(0.5, 20), (math.nan, 0), (-1.0, 0), (7.0, 40)])
def test_the_bar_of_a_share_has_a_proportional_width(share, cells):
    live = LiveProgress(terminal_console())
    live(StepDone(1, 0, 1.0, 0.1, 1.0, 0.1, share, 0.0, 0.0, 1.0))
    _, strip = live.render().renderables
    in_strip = [part for part in strip.spans if part.style == "on blue" and part.start < 40]
    assert sum(part.end - part.start for part in in_strip) == cells


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "[link=file:///etc]x[/link]"])
def test_square_brackets_in_a_run_name_are_not_read_as_markup(name):
    start = RunStarted(name, 1, 1, "allreduce", 4, "cnn", 10, 1, name)
    assert name in display_text(start, STEP)


def test_an_escape_in_a_run_name_does_not_reach_the_terminal():
    console = terminal_console()
    live = LiveProgress(console)
    live(RunStarted("\x1b]0;owned\x07\x9b31m", 1, 1, "\x1b[2J", 4, "\x1bc", 10, 1, "\x1b[8m"))
    live.close()
    written = console.file.getvalue()
    assert not any(evil in written for evil in ("\x1b]0;", "\x07", "\x9b", "\x1b[2J\x1b", "\x1bc"))
    assert "\x1b[8m" not in written


def test_redraws_within_a_tenth_of_a_second_are_skipped():
    now = [0.0]
    console = terminal_console()
    live = LiveProgress(console, clock=lambda: now[0])
    live(START)
    drawn_at_start = len(console.file.getvalue())
    live(STEP)
    drawn_too_soon = len(console.file.getvalue())
    now[0] = 1.0
    live(STEP)
    drawn_later = len(console.file.getvalue())
    live.close()
    assert drawn_at_start == drawn_too_soon < drawn_later


def test_the_cursor_is_restored_when_the_run_ends():
    console = terminal_console()
    live = LiveProgress(console)
    live(START)
    live(RunEnded(400, 10.0, 0.1, 0.9, 100.0))
    written = console.file.getvalue()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_closing_twice_does_nothing_more():
    console = terminal_console()
    live = LiveProgress(console)
    live(START)
    live.close()
    once = console.file.getvalue()
    live.close()
    assert console.file.getvalue() == once


def test_one_sink_shows_one_run_after_another():
    console = terminal_console()
    live = LiveProgress(console)
    for _ in range(2):
        live(START)
        live(STEP)
        live(RunEnded(400, 10.0, 0.1, 0.9, 100.0))
    assert console.file.getvalue().count("ended after 400 steps") == 2


def test_a_stream_that_is_no_terminal_gets_plain_lines():
    assert isinstance(console_sink(io.StringIO()), PlainLines)


def test_a_terminal_gets_the_live_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(console_sink(Terminal()), LiveProgress)


def test_a_terminal_that_cannot_draw_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(console_sink(Terminal()), PlainLines)

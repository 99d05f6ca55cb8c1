import io
import os
import re

import pytest
from rich.console import Console

from stretto.cluster.beats import Verdict, leave_verdict
from stretto.cluster.store import connect_store
from stretto.cluster.world import Meeting
from stretto.errors import ConfigError
from stretto.launch import local
from stretto.launch.pipes import Output, Screen
from stretto.launch.processes import Outcome
from stretto.telemetry.events import CheckpointSaved, DataRead, EvalDone, RunStarted, StepDone
from stretto.telemetry.live import LiveProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def started(monkeypatch):
    """Return what would be run, as the arguments of `run_workers`."""
    seen = {}

    def note(crew, **named):
        seen.update(named, crew=crew)
        return Outcome(0)

    monkeypatch.setattr(local, "run_workers", note)
    return seen


def logs_of(seen):
    return [worker.log and worker.log.name for worker in seen["crew"]]


def test_every_rank_has_a_log_where_there_is_no_terminal(started, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    local.run_here(["train"], 3, logs=tmp_path / "logs", say=print)
    assert logs_of(started) == ["rank-0.log", "rank-1.log", "rank-2.log"]
    assert started["screen"].rows_below == 0


def test_rank_zero_keeps_a_terminal_and_its_picture_has_room(started, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    local.run_here(["train"], 2, logs=tmp_path, say=print)
    assert logs_of(started) == [None, "rank-1.log"]
    assert started["screen"].rows_below == local.PICTURE_ROWS


def test_a_terminal_that_cannot_draw_is_no_terminal(started, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    local.run_here(["train"], 1, logs=tmp_path, say=print)
    assert logs_of(started) == ["rank-0.log"]


def test_the_word_that_a_rank_leaves_is_found_by_the_launcher(tmp_path, monkeypatch):
    word, found = Verdict(1, "no luck", "failed"), []

    def leave(crew, *, verdict, **_named):
        found.append(verdict())
        meeting = Meeting("127.0.0.1", int(crew[1].env["MASTER_PORT"]), held_by_rank_0=False)
        leave_verdict(connect_store(meeting, 1, 10.0), 0, word)
        found.append(verdict())
        return Outcome(1)

    monkeypatch.setattr(local, "run_workers", leave)
    local.run_here(["train"], 2, logs=tmp_path, say=print)
    assert found == [None, word]


def test_logs_that_cannot_be_kept_are_the_caller_s_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        local.run_here(["train"], 1, logs=tmp_path / "file" / "logs", say=print)


PICTURE = [
    StepDone(120, 1, 0.8123, 0.05, 1204.0, 0.04, 0.75, 0.2, 0.05, 72.0),
    EvalDone(100, 1, 0.7, 0.8),
    DataRead(100, 1, 10, 10, 0, []),
    CheckpointSaved(100, "runs/a", 2_000_000, 0.5),
]


def rows_after(text):
    """Return what a terminal shows that knows line ends, erasing a line and going up."""
    rows, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", text):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part == "\x1b[2K":
            rows[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif not part.startswith(("\x1b", "\r")):
            rows[row] += part
    return rows


def test_a_line_of_another_rank_survives_that_the_picture_is_drawn_anew(tmp_path):
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=120, _environ={})
    live = LiveProgress(console, clock=lambda: 0.0)
    for event in [RunStarted("run", 2, 1, "allreduce", 400, "cnn", 1000, 1), *PICTURE]:
        live(event)
    screen = Screen(terminal, terminal, rows_below=local.PICTURE_ROWS)
    output = Output({1: tmp_path / "log"}, screen)
    with output.connected(1) as (end, _):
        os.write(end, b"out of disk\n")
    output.close()
    live(PICTURE[-1])
    live.close()
    rows = rows_after(terminal.getvalue())
    assert "[rank 1] out of disk" in rows
    assert rows.index("[rank 1] out of disk") < len(rows) - local.PICTURE_ROWS

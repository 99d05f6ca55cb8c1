import io
import os
import re

import pytest
from rich.console import Console

from stretto.cluster.heartbeats import FailureReport, post_failure_report
from stretto.cluster.store import connect_store
from stretto.cluster.world import StoreAddress
from stretto.errors import ConfigError
from stretto.launch import local_workers as local
from stretto.launch.worker_group import LaunchOutcome
from stretto.launch.worker_output import ConsoleStreams, WorkerOutput
from stretto.telemetry.events import CheckpointSaved, DataRead, EvalDone, RunStarted, StepDone
from stretto.telemetry.live import LiveProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def started(monkeypatch):
    """Record the calls of `run_workers` instead of starting workers."""
    seen = {}

    def note(workers, **named):
        seen.update(named, workers=workers)
        return LaunchOutcome(0)

    monkeypatch.setattr(local, "run_workers", note)
    return seen


def logs_of(seen):
    return [worker.log and worker.log.name for worker in seen["workers"]]


def test_without_a_terminal_every_rank_has_a_log(started, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    local.run_local_workers(["train"], 3, logs=tmp_path / "logs", log_line=print)
    assert logs_of(started) == ["rank-0.log", "rank-1.log", "rank-2.log"]
    assert started["console_streams"].reserved_rows == 0


def test_rank_zero_writes_to_a_terminal_with_rows_for_its_live_display(
    started, tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    local.run_local_workers(["train"], 2, logs=tmp_path, log_line=print)
    assert logs_of(started) == [None, "rank-1.log"]
    assert started["console_streams"].reserved_rows == local.LIVE_PROGRESS_ROWS


def test_a_dumb_terminal_counts_as_no_terminal(started, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    local.run_local_workers(["train"], 1, logs=tmp_path, log_line=print)
    assert logs_of(started) == ["rank-0.log"]


def test_the_launcher_finds_the_failure_report_of_a_rank(tmp_path, monkeypatch):
    word, found = FailureReport(1, "no luck", "failed"), []

    def leave(workers, *, failure_report, **_named):
        found.append(failure_report())
        store_address = StoreAddress(
            "127.0.0.1", int(workers[1].env["MASTER_PORT"]), started_by_rank_0=False
        )
        post_failure_report(connect_store(store_address, 1, 10.0), 0, word)
        found.append(failure_report())
        return LaunchOutcome(1)

    monkeypatch.setattr(local, "run_workers", leave)
    local.run_local_workers(["train"], 2, logs=tmp_path, log_line=print)
    assert found == [None, word]


def test_logs_that_cannot_be_written_are_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot prepare log folder"):
        local.run_local_workers(["train"], 1, logs=tmp_path / "file" / "logs", log_line=print)


LIVE_DISPLAY = [
    StepDone(120, 1, 0.8123, 0.05, 1204.0, 0.04, 0.75, 0.2, 0.05, 72.0),
    EvalDone(100, 1, 0.7, 0.8),
    DataRead(100, 1, 10, 10, 0, []),
    CheckpointSaved(100, "runs/a", 2_000_000, 0.5),
]


def rows_after(text):
    """Return the rows of a terminal that supports line ends, erasing a line and moving up."""
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


def test_a_line_of_another_rank_survives_a_redraw_of_the_live_display(tmp_path):
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=120, _environ={})
    live = LiveProgress(console, clock=lambda: 0.0)
    for event in [RunStarted("run", 2, 1, "allreduce", 400, "cnn", 1000, 1), *LIVE_DISPLAY]:
        live(event)
    console_streams = ConsoleStreams(terminal, terminal, reserved_rows=local.LIVE_PROGRESS_ROWS)
    output = WorkerOutput({1: tmp_path / "log"}, console_streams)
    with output.redirect_streams(1) as (end, _):
        os.write(end, b"out of disk\n")
    output.close()
    live(LIVE_DISPLAY[-1])
    live.close()
    rows = rows_after(terminal.getvalue())
    assert "[rank 1] out of disk" in rows
    assert rows.index("[rank 1] out of disk") < len(rows) - local.LIVE_PROGRESS_ROWS

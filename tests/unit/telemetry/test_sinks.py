"""JSON lines, plain lines and the fan-out."""

import io
import json
import math
from datetime import UTC, datetime

import pytest

from stretto.errors import StrettoError
from stretto.telemetry.events import EvalDone, RunStarted, StepDone
from stretto.telemetry.sinks import (
    JsonLines,
    PlainLines,
    fan_out,
    read_events,
    read_timestamped_events,
)

FIRST, SECOND = EvalDone(1, 0, 0.5, 0.9), EvalDone(2, 0, 0.4, None)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "events.jsonl"


def write(path, *events, append):
    sink = JsonLines(path, append, clock=lambda: NOON)
    for event in events:
        sink(event)
    sink.close()


def test_what_is_written_is_read_back_in_order(path):
    write(path, FIRST, SECOND, append=False)
    assert read_events(path) == [FIRST, SECOND]


def test_a_line_is_flushed_before_the_call_returns(path):
    sink = JsonLines(path, append=False)
    sink(FIRST)
    read_before_closing = read_events(path)
    sink.close()
    assert read_before_closing == [FIRST]


def test_the_time_of_writing_is_read_back(path):
    write(path, FIRST, append=False)
    assert [stamped.time for stamped in read_timestamped_events(path)] == [NOON]


def test_a_nan_loss_leaves_the_line_valid_json(path):
    write(path, EvalDone(1, 0, math.nan, math.inf), append=False)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    assert math.isnan(read_events(path)[0].loss)


def test_appending_keeps_earlier_events(path):
    write(path, FIRST, append=False)
    write(path, SECOND, append=True)
    assert read_events(path) == [FIRST, SECOND]


def test_not_appending_replaces_the_file(path):
    write(path, FIRST, append=False)
    write(path, SECOND, append=False)
    assert read_events(path) == [SECOND]


def every_torn_end(tmp_path):
    whole = tmp_path / "whole.jsonl"
    write(whole, FIRST, SECOND, append=False)
    content = whole.read_bytes()
    first_line = content.index(b"\n") + 1
    return [content[:length] for length in range(first_line, len(content))]


def test_a_partial_last_line_is_ignored_by_the_reader(tmp_path):
    for torn in every_torn_end(tmp_path):
        (tmp_path / "torn.jsonl").write_bytes(torn)
        assert read_events(tmp_path / "torn.jsonl") in ([FIRST], [FIRST, SECOND])


def test_appending_after_a_partial_line_leaves_only_valid_lines(tmp_path):
    path = tmp_path / "torn.jsonl"
    for torn in every_torn_end(tmp_path):
        path.write_bytes(torn)
        write(path, SECOND, append=True)
        for text in path.read_text().splitlines():
            json.loads(text)
        assert read_events(path)[-1] == SECOND
        assert read_events(path)[0] == FIRST


def test_a_whole_line_without_its_line_break_is_not_lost_by_appending(path):
    write(path, FIRST, append=False)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    write(path, SECOND, append=True)
    assert read_events(path) == [FIRST, SECOND]


@pytest.mark.parametrize("damage", [b"not json\n", b"[]\n", b'{"event": "eval_done"}\n', b"\n"])
def test_damage_in_the_middle_is_an_error_that_names_the_line(path, damage):
    write(path, FIRST, append=False)
    path.write_bytes(path.read_bytes() + damage + path.read_bytes())
    with pytest.raises(StrettoError, match=r"events\.jsonl, line 2"):
        read_events(path)


def test_plain_lines_show_the_length_of_the_run():
    stream = io.StringIO()
    sink = PlainLines(stream)
    sink(RunStarted("r", 1, 1, "allreduce", 400, "cnn", 10, 1, ""))
    sink(StepDone(40, 0, 0.5, 0.1, 1.0, 0.1, 1.0, 0.0, 0.0, 1.0))
    assert stream.getvalue().splitlines()[1].startswith("step 40/400 |")


def test_closing_plain_lines_leaves_the_stream_to_its_owner():
    stream = io.StringIO()
    PlainLines(stream).close()
    assert not stream.closed


def test_a_name_outside_the_stream_encoding_is_escaped():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainLines(stream)(RunStarted("\u03b1", 1, 1, "allreduce", 4, "cnn", 10, 1, ""))
    assert b"run \\u03b1 |" in stream.buffer.getvalue()


class RecordingSink:
    def __init__(self, fails=False):
        self.events, self.closed, self.fails = [], False, fails

    def __call__(self, event):
        self.events.append(event)

    def close(self):
        self.closed = True
        if self.fails:
            raise OSError("disk gone")


def test_fan_out_passes_each_event_to_each_sink():
    sinks = [RecordingSink(), RecordingSink()]
    combined = fan_out(sinks)
    combined(FIRST)
    combined(SECOND)
    assert [sink.events for sink in sinks] == [[FIRST, SECOND]] * 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_sink_that_fails_to_close_does_not_keep_the_others_open(failing):
    sinks = [RecordingSink(fails=i == failing) for i in range(3)]
    with pytest.raises(OSError, match="disk gone"):
        fan_out(sinks).close()
    assert all(sink.closed for sink in sinks)

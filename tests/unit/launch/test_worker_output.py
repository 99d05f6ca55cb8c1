import io
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.launch.worker_output import MAX_LINE_BYTES, ConsoleStreams, WorkerOutput


class FakeClock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class WriteEnds:
    """The workers' ends of the pipes, kept open as their processes would keep them."""

    def __init__(self, folder, num_ranks=3, *, logs=None, **console_streams):
        self.clock = FakeClock()
        self.out, self.err = (
            console_streams.pop("out", io.StringIO()),
            console_streams.pop("err", io.StringIO()),
        )
        self.logs = logs or {rank: folder / f"rank-{rank}.log" for rank in range(num_ranks)}
        self.output = WorkerOutput(
            self.logs, ConsoleStreams(self.out, self.err, **console_streams), clock=self.clock
        )
        self.fds = {}
        for rank in self.logs:
            with self.output.redirect_streams(rank) as ends:
                self.fds[rank] = [os.dup(end) for end in ends]

    def say(self, rank, data, *, stream=1):
        os.write(self.fds[rank][stream], data)
        self.output.read(self.output.descriptors)

    def pass_time(self, seconds):
        self.clock.now_s += seconds
        self.output.read([])

    def leave(self):
        for fd in {fd for ends in self.fds.values() for fd in ends}:
            os.close(fd)
        self.fds = {}


@contextmanager
def workers(folder, *args, **kwargs):
    ends = WriteEnds(folder, *args, **kwargs)
    try:
        yield ends
    finally:
        ends.leave()
        ends.output.close()


def closed(ends):
    ends.leave()
    ends.output.close()
    return ends.err.getvalue()


said = st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=20)), max_size=30)


@settings(max_examples=50)
@given(said)
def test_every_byte_of_every_rank_is_in_its_log(speeches):
    with tempfile.TemporaryDirectory() as folder, workers(Path(folder)) as ends:
        for rank, data in speeches:
            ends.say(rank, data)
        for rank, log in ends.logs.items():
            assert log.read_bytes() == b"".join(data for who, data in speeches if who == rank)


def test_a_flood_is_complete_in_the_log(tmp_path):
    lines = b"".join(b"line %d\n" % number for number in range(5000))
    with workers(tmp_path) as ends:
        ends.say(1, lines)
        assert ends.logs[1].read_bytes() == lines
        assert "... 4,900 more lines in" in closed(ends)


def test_equal_lines_of_several_ranks_are_shown_once_when_due(tmp_path):
    with workers(tmp_path) as ends:
        ends.say(1, b"hello\n")
        ends.say(2, b"hello\n")
        assert ends.err.getvalue() == ""
        assert ends.output.max_wait_s() == pytest.approx(0.5)
        ends.pass_time(0.5)
        assert ends.err.getvalue() == "[ranks 1-2] hello\n"


def test_rank_zero_s_streams_stay_separate_and_are_shown_at_once(tmp_path):
    with workers(tmp_path) as ends:
        ends.say(0, b"result\n", stream=0)
        ends.say(0, b"progress\n", stream=1)
        assert (ends.out.getvalue(), ends.err.getvalue()) == ("result\n", "progress\n")


def test_a_line_split_over_two_reads_is_one_line(tmp_path):
    with workers(tmp_path) as ends:
        for part in ("gr", "\u00fc".encode()[:1], "\u00fc".encode()[1:] + b"n\n"):
            ends.say(0, part if isinstance(part, bytes) else part.encode())
        assert ends.err.getvalue() == "gr\u00fcn\n"


def test_bytes_that_are_not_text_are_replaced(tmp_path):
    with workers(tmp_path) as ends:
        ends.say(0, b"\xff\xfeok\n")
        assert ends.err.getvalue() == "\ufffd\ufffdok\n"


def test_a_last_line_without_a_line_end_is_shown_though_its_pipe_stays_open(tmp_path):
    with workers(tmp_path) as ends:
        os.write(ends.fds[0][1], b"good bye")
        ends.output.drain(0)
        assert ends.err.getvalue() == "good bye\n"


def test_an_open_pipe_does_not_keep_the_output_from_closing(tmp_path):
    with workers(tmp_path) as ends:
        ends.say(1, b"here")
        ends.output.close()
        assert ends.err.getvalue() == "[rank 1] here\n"
        assert not ends.output.descriptors


def test_a_line_without_end_is_split(tmp_path):
    with workers(tmp_path) as ends:
        ends.say(0, b"x" * MAX_LINE_BYTES)
        ends.say(0, b"x")
        assert ends.err.getvalue() == "x" * (MAX_LINE_BYTES + 1) + "\n"


def test_a_log_that_cannot_be_written_is_reported_once_and_output_still_shown():
    full = {0: Path("/dev/full")}
    with workers(Path(), logs=full) as ends:
        ends.say(0, b"one\n")
        ends.say(0, b"two\n")
        message = "/dev/full cannot be written (No space left on device)"
        assert ends.err.getvalue() == (
            f"{message}: output of rank 0 is shown here only\none\ntwo\n"
        )


class HungUp(io.StringIO):
    def write(self, _text):
        raise OSError(5, "Input/output error")


def test_a_closed_screen_does_not_keep_output_from_the_logs(tmp_path):
    with workers(tmp_path, err=HungUp()) as ends:
        ends.say(0, b"one\n")
        ends.say(0, b"two\n")
        assert ends.logs[0].read_text() == "one\ntwo\n"


def test_a_screen_with_a_small_charset_shows_escapes(tmp_path):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with workers(tmp_path, out=out) as ends:
        ends.say(0, "gr\u00fcn\n".encode(), stream=0)
        assert out.buffer.getvalue() == b"gr\\xfcn\n"


def test_rows_are_reserved_for_the_live_display(tmp_path):
    with workers(tmp_path, reserved_rows=2) as ends:
        ends.say(1, b"x\n")
        ends.say(2, b"y\n")
        ends.pass_time(1.0)
        assert ends.err.getvalue() == "\n[rank 1] x\n[rank 2] y\n\n\n"


def test_without_a_screen_output_goes_directly_to_the_logs(tmp_path):
    output = WorkerOutput({0: None, 1: tmp_path / "log"})
    with output.redirect_streams(0) as ends:
        assert ends == (None, None)
    with output.redirect_streams(1) as (stdout, _):
        os.write(stdout, b"direct\n")
    assert (tmp_path / "log").read_text() == "direct\n"
    assert not output.descriptors

"""Spans, timelines, the recorder, and the trace that viewers open."""

import json
import math
import threading
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.telemetry.timeline import (
    Recorder,
    Span,
    Timeline,
    busy_s,
    chrome_trace,
    read_chrome_trace,
    write_chrome_trace,
)

times = st.floats(min_value=-1e9, max_value=1e9)
lanes = st.sampled_from(["compute", "comm", "data", 'a "quoted" lane', ""])


@st.composite
def span_values(draw):
    start_s, end_s = sorted((draw(times), draw(times)))
    step, num_bytes = draw(st.integers(-1, 10**6)), draw(st.integers(0, 2**50))
    return Span(draw(st.text(max_size=12)), draw(lanes), start_s, end_s, step, num_bytes)


spans = st.lists(span_values(), max_size=8).map(tuple)
timelines = st.dictionaries(st.integers(0, 10_000), spans, max_size=4).map(
    lambda by_rank: [Timeline(rank, of_rank) for rank, of_rank in by_rank.items()]
)


def counting_clock():
    return map(float, count()).__next__


def grid_span(interval, lane="compute"):
    return Span("work", lane, float(min(interval)), float(max(interval)))


intervals = st.tuples(st.integers(0, 30), st.integers(0, 30))


def cells_covered(pairs):
    return {cell for a, b in pairs for cell in range(min(a, b), max(a, b))}


@given(timelines)
def test_reading_a_written_trace_returns_equal_timelines(tmp_path_factory, given_timelines):
    path = tmp_path_factory.mktemp("trace") / "rank-0.json"
    write_chrome_trace(path, given_timelines)
    assert read_chrome_trace(path) == given_timelines


@given(timelines)
def test_every_complete_event_belongs_to_a_named_process_and_thread(given_timelines):
    events = chrome_trace(given_timelines)["traceEvents"]
    processes = {e["pid"] for e in events if e["name"] == "process_name" and e["ph"] == "M"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in complete} <= processes
    assert {(e["pid"], e["tid"]) for e in complete} <= threads


def test_the_trace_counts_in_microseconds():
    trace = chrome_trace([Timeline(3, (Span("forward", "compute", 2.0, 2.5),))])
    (event,) = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert (event["ts"], event["dur"], event["pid"]) == (2e6, 0.5e6, 3)


def test_two_timelines_of_one_rank_are_refused():
    with pytest.raises(StrettoError, match="rank 1"):
        chrome_trace([Timeline(1, ()), Timeline(1, ())])


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}'])
def test_a_file_that_is_not_a_trace_is_named_in_the_error(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(StrettoError, match=r"broken\.json"):
        read_chrome_trace(path)


def test_the_trace_is_plain_json(tmp_path):
    write_chrome_trace(tmp_path / "t.json", [Timeline(0, (Span("a", "compute", 0.0, 1.0),))])
    assert json.loads((tmp_path / "t.json").read_text())["displayTimeUnit"] == "ms"


@pytest.mark.parametrize(
    ("start_s", "end_s"), [(2.0, 1.0), (math.nan, 1.0), (0.0, math.nan), (0.0, math.inf)]
)
def test_a_span_without_finite_ordered_times_is_refused(start_s, end_s):
    with pytest.raises(StrettoError, match="forward"):
        Span("forward", "compute", start_s, end_s)


@given(st.lists(intervals))
def test_busy_is_the_length_of_the_union(pairs):
    assert busy_s(grid_span(pair) for pair in pairs) == len(cells_covered(pairs))


def test_a_recorded_span_has_name_lane_step_and_bytes():
    recorder = Recorder(2, clock=counting_clock())
    with recorder.span("all-reduce", "comm", step=7, num_bytes=64):
        pass
    assert recorder.timeline() == Timeline(2, (Span("all-reduce", "comm", 0.0, 1.0, 7, 64),))


def test_a_span_whose_body_raises_is_recorded():
    recorder = Recorder(0, clock=counting_clock())
    with pytest.raises(ZeroDivisionError), recorder.span("forward", "compute"):
        1 / 0  # noqa: B018
    assert [span.name for span in recorder.timeline().spans] == ["forward"]


def test_the_recorder_keeps_the_latest_and_counts_the_dropped():
    recorder = Recorder(0, max_spans=3)
    for step in range(5):
        recorder.add(Span("s", "compute", 0.0, 1.0, step))
    kept = [span.step for span in recorder.timeline().spans]
    assert (kept, recorder.num_dropped) == ([2, 3, 4], 2)


def test_no_span_is_lost_between_threads():
    recorder = Recorder(0)

    def record(lane):
        for _ in range(500):
            with recorder.span("s", lane):
                pass

    threads = [threading.Thread(target=record, args=(f"lane {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.timeline().spans) == 2000

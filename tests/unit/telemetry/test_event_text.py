"""Events as one line of plain text."""

import math
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from stretto.telemetry.event_text import event_line, strip_unprintable
from stretto.telemetry.events import (
    EVENTS,
    EvalDone,
    RunEnded,
    RunStarted,
    StepDone,
    StepSkipped,
    ThroughputFactors,
)

events = st.one_of([st.from_type(kind) for kind in EVENTS.values()])


@given(st.text())
def test_printable_text_has_no_control_characters(text):
    assert not any(
        unicodedata.category(char) in {"Cc", "Cf", "Cs"} for char in strip_unprintable(text)
    )


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S"])))
def test_letters_digits_and_symbols_of_any_script_are_kept(text):
    assert strip_unprintable(text) == text


def test_an_escape_sequence_loses_its_escape():
    assert strip_unprintable("\x1b[31mred\x1b[0m\r\nnext") == "[31mred[0m  next"


@given(events)
def test_every_event_is_exactly_one_line(event):
    assert len(event_line(event).splitlines()) == 1


def test_the_line_of_a_step_has_progress_speed_and_shares():
    line = event_line(StepDone(40, 1, 0.5, 0.1, 1234.5, 0.025, 0.8, 0.15, 0.05, 90.0), steps=400)
    assert line == (
        "step 40/400 | loss 0.5000 | 1,234 samples/s | 25 ms a step | 1 min 30 s left | "
        "compute 80%, communication 15%, data 5%"
    )


def test_the_line_of_a_step_has_the_consensus_distance_if_measured():
    line = event_line(
        StepDone(40, 1, 0.5, 0.1, 100.0, 0.025, 0.8, 0.15, 0.05, 90.0, consensus_distance=0.0123)
    )
    assert line.startswith("step 40 | loss 0.5000, 1.23% apart | 100 samples/s")


def test_an_infinite_time_left_is_shown_as_unknown():
    line = event_line(StepDone(1, 0, math.nan, 0.1, 1.0, 0.1, math.nan, 0.0, 0.0, math.inf))
    assert "unknown left" in line
    assert "compute unknown" in line


def test_one_worker_is_singular():
    line = event_line(RunStarted("r", 1, 1, "allreduce", 10, "cnn", 1000, 2, ""))
    assert "1 worker on 1 host, 2 threads each" in line


def test_an_evaluation_without_accuracy_does_not_mention_it():
    assert "accuracy" not in event_line(EvalDone(3, 0, 0.1, None))


def test_the_last_line_has_the_measured_scaling():
    line = event_line(RunEnded(9, 1.0, 0.1, None, 990.0, ThroughputFactors(330.0, 4, 0.75)))
    assert "990 samples/s = 330 x 4 workers x 75.0%" in line


def test_the_line_of_a_skipped_step_has_the_reason():
    assert event_line(StepSkipped(7, "rank 2: oops")) == "left out | step 7, rank 2: oops"

"""Events as one line of plain text."""

import math
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from stretto.telemetry.events import (
    EVENTS,
    EvalDone,
    RunEnded,
    RunStarted,
    Scaling,
    StepDone,
    StepLeftOut,
)
from stretto.telemetry.wording import line, printable

events = st.one_of([st.from_type(kind) for kind in EVENTS.values()])


@given(st.text())
def test_nothing_printable_can_steer_a_terminal(text):
    assert not any(unicodedata.category(char) in {"Cc", "Cf", "Cs"} for char in printable(text))


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S"])))
def test_letters_digits_and_signs_of_any_script_stay(text):
    assert printable(text) == text


def test_an_escape_sequence_loses_its_escape():
    assert printable("\x1b[31mred\x1b[0m\r\nnext") == "[31mred[0m  next"


@given(events)
def test_every_event_is_exactly_one_line(event):
    assert len(line(event).splitlines()) == 1


def test_a_step_is_told_with_all_that_matters():
    told = line(StepDone(40, 1, 0.5, 0.1, 1234.5, 0.025, 0.8, 0.15, 0.05, 90.0), steps=400)
    assert told == (
        "step 40/400 | loss 0.5000 | 1,234 samples/s | 25 ms a step | 1 min 30 s left | "
        "compute 80%, communication 15%, data 5%"
    )


def test_a_step_tells_how_far_apart_models_are_where_that_was_measured():
    told = line(StepDone(40, 1, 0.5, 0.1, 100.0, 0.025, 0.8, 0.15, 0.05, 90.0, apart=0.0123))
    assert told.startswith("step 40 | loss 0.5000, 1.23% apart | 100 samples/s")


def test_a_time_left_that_nobody_knows_is_called_unknown():
    told = line(StepDone(1, 0, math.nan, 0.1, 1.0, 0.1, math.nan, 0.0, 0.0, math.inf))
    assert "unknown left" in told
    assert "compute unknown" in told


def test_one_worker_is_not_called_workers():
    told = line(RunStarted("r", 1, 1, "allreduce", 10, "cnn", 1000, 2, ""))
    assert "1 worker on 1 host, 2 threads each" in told


def test_an_evaluation_without_accuracy_does_not_mention_it():
    assert "accuracy" not in line(EvalDone(3, 0, 0.1, None))


def test_measured_scaling_is_told_at_the_end():
    told = line(RunEnded(9, 1.0, 0.1, None, 990.0, Scaling(330.0, 4, 0.75)))
    assert "990 samples/s = 330 x 4 workers x 75.0%" in told


def test_a_step_left_out_is_told_with_the_reason():
    assert line(StepLeftOut(7, "rank 2: oops")) == "left out | step 7, rank 2: oops"

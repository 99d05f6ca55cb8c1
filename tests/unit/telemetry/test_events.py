"""Events and their form as JSON objects."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.telemetry.events import EVENTS, EvalDone, StepDone, from_record, to_record

events = st.one_of([st.from_type(kind) for kind in EVENTS.values()])


def same(one, other):
    """Compare as text, because NaN is not equal to itself."""
    return repr(one) == repr(other)


@given(events)
def test_every_event_survives_strict_json(event):
    text = json.dumps(to_record(event, time="2026-01-01T00:00:00+00:00"), allow_nan=False)
    assert same(from_record(json.loads(text)), event)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_become_strings(loss):
    record = to_record(EvalDone(1, 0, loss, None))
    assert record["loss"] == str(loss)
    assert same(from_record(record), EvalDone(1, 0, loss, None))


def test_a_record_has_event_name_and_time():
    record = to_record(EvalDone(1, 0, 0.5, 0.9), time="noon")
    assert (record["event"], record["time"]) == ("eval_done", "noon")


def test_a_run_called_nan_keeps_its_name():
    fields = {"run": "nan", "strategy": "inf", "model": "-inf"}
    counts = dict.fromkeys(("workers", "hosts", "steps", "parameters", "threads"), 1)
    assert from_record({"event": "run_started", **fields, **counts}).run == "nan"


def test_an_unknown_event_is_named_with_the_known_ones():
    with pytest.raises(StrettoError, match=r"'step_dome'.*step_done"):
        from_record({"event": "step_dome"})


def test_a_field_of_the_wrong_type_is_named():
    record = to_record(StepDone(1, 0, 1.0, 0.1, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0))
    with pytest.raises(StrettoError, match=r"step_done.*lr"):
        from_record({**record, "lr": "fast"})


def test_a_key_from_a_later_version_is_ignored():
    record = to_record(EvalDone(1, 0, 0.5, 0.9))
    assert from_record({**record, "colour": "green"}) == EvalDone(1, 0, 0.5, 0.9)

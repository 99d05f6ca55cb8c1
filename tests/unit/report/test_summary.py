"""The table of runs."""

import math

import pytest

from stretto.report.html import format_number, summary_row
from stretto.report.run_records import RunRecord
from stretto.telemetry.events import EvalDone
from tests.unit.report.examples import run, start, step


def test_a_finished_run_is_summarised_by_its_end():
    row = summary_row(run(losses=(1.0, 0.25), accuracy=0.9), 0)
    assert (row.workers, row.steps, row.loss, row.accuracy) == ("4", "2", "0.2500", "90.0%")
    assert (row.samples_per_s, row.seconds) == ("640", "2.5")


def test_an_unfinished_run_shows_how_far_it_came():
    first, last = EvalDone(3, 0, 0.9, 0.125), EvalDone(7, 0, 0.5, 0.25)
    record = RunRecord("r", [start(steps=1000), step(3, 0.75), first, step(7, 0.5), last])
    row = summary_row(record, 0)
    assert (row.steps, row.loss, row.accuracy) == ("7 of 1,000, not finished", "0.5000", "25.0%")


def test_a_run_without_events_has_dashes():
    row = summary_row(RunRecord("r", []), 0)
    assert {row.workers, row.steps, row.loss, row.accuracy, row.seconds} == {"-"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "not a number"), (math.inf, "infinite"), (None, "-"), (0.5, "0.50")],
)
def test_a_missing_or_infinite_number_becomes_words(value, text):
    assert format_number(value, ".2f") == text

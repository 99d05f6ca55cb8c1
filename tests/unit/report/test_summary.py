"""The table of runs."""

import math

import pytest

from stretto.report.records import RunRecord
from stretto.report.summary import number, summary_row
from stretto.telemetry.events import EvalDone
from tests.unit.report.made_up import run, start, step


def test_a_finished_run_is_told_by_its_last_word():
    row = summary_row(run(losses=(1.0, 0.25), accuracy=0.9), 0)
    assert (row.workers, row.steps, row.loss, row.accuracy) == ("4", "2", "0.2500", "90.0%")
    assert (row.samples_per_s, row.seconds) == ("640", "2.5")


def test_a_run_that_did_not_finish_says_how_far_it_came():
    record = RunRecord("r", [start(steps=1000), step(7, 0.5), EvalDone(7, 0, 0.5, 0.25)])
    row = summary_row(record, 0)
    assert (row.steps, row.loss, row.accuracy) == ("7 of 1,000, not finished", "0.5000", "25.0%")


def test_a_run_without_events_has_dashes():
    row = summary_row(RunRecord("r", []), 0)
    assert {row.workers, row.steps, row.loss, row.accuracy, row.seconds} == {"-"}


@pytest.mark.parametrize(
    ("value", "words"),
    [(math.nan, "not a number"), (math.inf, "infinite"), (None, "-"), (0.5, "0.50")],
)
def test_a_number_that_is_none_is_said_in_words(value, words):
    assert number(value, ".2f") == words

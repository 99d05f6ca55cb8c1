"""The pictures as values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.report.figures import DASHES, PALETTE, figures, running_mean, shown
from stretto.report.records import RunRecord
from tests.unit.report.made_up import run, start, step


def titled(drawn, title):
    return next(figure for figure in drawn if figure.title == title)


def test_all_comparing_pictures_are_there():
    assert [figure.title for figure in figures([run()])] == [
        "Loss against steps",
        "Loss against time",
        "Accuracy on unseen data",
        "Where the time of a step went",
    ]


@pytest.mark.parametrize("runs", [[], [RunRecord("r", [])], [RunRecord("r", [start()])]])
def test_without_anything_to_show_there_is_no_picture(runs):
    assert figures(runs) == []


def test_each_picture_has_a_caption_of_one_sentence():
    for figure in figures([run()]):
        assert figure.caption.count(".") == 1
        assert figure.caption.endswith(".")


def test_two_runs_differ_by_colour_and_by_dash():
    one, other = titled(figures([run("a"), run("b")]), "Loss against steps").traces
    assert one["line"]["color"] != other["line"]["color"]
    assert one["line"]["dash"] != other["line"]["dash"]


def test_a_run_keeps_its_colour_when_one_before_it_has_no_steps():
    (only,) = titled(figures([RunRecord("empty", []), run("b")]), "Loss against steps").traces
    assert (only["line"]["color"], only["line"]["dash"]) == (PALETTE[1], DASHES[1])


def test_a_long_run_is_smoothed_and_keeps_its_raw_losses_behind():
    noisy = run(losses=[1.0, 0.0] * 50)
    raw, smooth = titled(figures([noisy]), "Loss against steps").traces
    assert raw["y"] == [1.0, 0.0] * 50
    assert max(smooth["y"][20:80]) < 0.8


def test_a_very_long_run_does_not_make_a_heavy_page():
    record = RunRecord("r", [step(number) for number in range(1, 25_001)])
    smooth = titled(figures([record]), "Loss against steps").traces[-1]
    assert len(smooth["x"]) <= 1001
    assert smooth["x"][-1] == 25_000


@given(st.lists(st.floats(-100, 100), min_size=1), st.integers(1, 30))
def test_a_running_mean_stays_within_the_values(values, window):
    means = running_mean(values, window=window)
    assert len(means) == len(values)
    assert all(min(values) - 1e-9 <= mean <= max(values) + 1e-9 for mean in means)


def test_a_running_mean_goes_around_a_loss_that_is_no_number():
    means = running_mean([1.0, math.nan, 3.0, 3.0, 3.0], window=3)
    assert math.isnan(means[1])
    assert not math.isnan(means[2])


@given(shares=st.lists(st.tuples(*[st.floats(0, 0.33)] * 3), min_size=1, max_size=5))
def test_the_bar_of_every_run_fills_the_whole_step(shares):
    runs = [RunRecord("same name", [step(1, shares=each)]) for each in shares]
    bars = titled(figures(runs), "Where the time of a step went").traces
    for row in range(len(runs)):
        assert sum(bar["x"][row] for bar in bars) == pytest.approx(1.0, abs=1e-3)


def test_an_evaluation_without_accuracy_draws_no_curve():
    titles = [figure.title for figure in figures([run(accuracy=None)])]
    assert "Accuracy on unseen data" not in titles


def test_a_label_is_escaped_for_plotly_which_reads_tags():
    assert shown("<a href='x'>&") == "&lt;a href=&#x27;x&#x27;&gt;&amp;"


def test_a_long_label_is_cut():
    assert shown("x" * 500) == "x" * 45 + "..."


def test_a_label_holds_nothing_that_steers_a_terminal_or_turns_the_reading_direction():
    assert shown("\x1b[31mred\u202e") == "[31mred"

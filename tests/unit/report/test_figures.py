"""The figures of a report as plotly data."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.report.figures import DASHES, PALETTE, escape_label, figures, running_mean
from stretto.report.run_records import RunRecord
from tests.unit.report.examples import run, start, step


def figure_titled(drawn, title):
    return next(figure for figure in drawn if figure.title == title)


def test_all_figures_are_there():
    assert [figure.title for figure in figures([run()])] == [
        "Loss against steps",
        "Loss against time",
        "Accuracy on unseen data",
        "Where the time of a step went",
    ]


@pytest.mark.parametrize("runs", [[], [RunRecord("r", [])], [RunRecord("r", [start()])]])
def test_without_data_there_is_no_figure(runs):
    assert figures(runs) == []


def test_each_figure_has_a_caption_of_one_sentence():
    for figure in figures([run()]):
        assert figure.caption.count(".") == 1
        assert figure.caption.endswith(".")


def test_two_runs_differ_by_colour_and_by_dash():
    one, other = figure_titled(figures([run("a"), run("b")]), "Loss against steps").traces
    assert one["line"]["color"] != other["line"]["color"]
    assert one["line"]["dash"] != other["line"]["dash"]


def test_a_run_keeps_its_colour_when_one_before_it_has_no_steps():
    (only,) = figure_titled(
        figures([RunRecord("empty", []), run("b")]), "Loss against steps"
    ).traces
    assert (only["line"]["color"], only["line"]["dash"]) == (PALETTE[1], DASHES[1])


def test_a_long_run_is_smoothed_and_keeps_its_raw_losses_behind():
    noisy = run(losses=[1.0, 0.0] * 50)
    raw, smooth = figure_titled(figures([noisy]), "Loss against steps").traces
    assert raw["y"] == [1.0, 0.0] * 50
    # A window of 100 / 25 steps is 2 steps to both sides: 3 of 5 are like the one in the middle.
    assert smooth["y"][:2] == [1.0, pytest.approx(2 / 3)]
    assert smooth["y"][2:98] == pytest.approx([0.6, 0.4] * 48)


@pytest.mark.parametrize("steps", [1_999, 25_000])
def test_a_very_long_run_does_not_make_a_heavy_page(steps):
    record = RunRecord("r", [step(number) for number in range(1, steps + 1)])
    smooth = figure_titled(figures([record]), "Loss against steps").traces[-1]
    assert len(smooth["x"]) <= 1001
    assert smooth["x"][-1] == steps


def naive_running_mean(values, window):
    """Return the mean of what lies within half a window, or half as far as the nearer end."""
    means = []
    for index in range(len(values)):
        half = min(window // 2, index, len(values) - 1 - index)
        near = [values[i] for i in range(index - half, index + half + 1)]
        means.append(sum(near) / len(near))
    return means


@given(st.lists(st.floats(-100, 100), min_size=1), st.integers(1, 30))
def test_a_running_mean_is_the_mean_of_what_is_near(values, window):
    means = running_mean(values, window=window)
    assert means == pytest.approx(naive_running_mean(values, window), abs=1e-9)


def test_a_running_mean_by_hand():
    assert running_mean([1.0, 2.0, 6.0, 4.0, 0.0], window=3) == [
        1.0,
        3.0,
        4.0,
        pytest.approx(10 / 3),
        0.0,
    ]


def test_a_running_mean_goes_around_a_loss_that_is_no_number():
    means = running_mean([1.0, math.nan, 3.0, 4.0, 5.0], window=3)
    assert math.isnan(means[1])
    assert [means[0], *means[2:]] == [1.0, 3.5, 4.0, 5.0]


def test_each_part_of_a_bar_is_the_mean_share_of_the_steps():
    runs = [
        RunRecord("same name", [step(1, shares=(0.5, 0.2, 0.1)), step(2, shares=(0.7, 0.1, 0.0))]),
        RunRecord("empty", []),
        RunRecord("same name", [step(1, shares=(0.25, 0.125, 0.625))]),
    ]
    bars = figure_titled(figures(runs), "Where the time of a step went").traces
    assert {bar["name"]: bar["x"] for bar in bars} == {
        "compute": [pytest.approx(0.6), 0.25],
        "exposed communication": [pytest.approx(0.15), 0.125],
        "waiting for data": [pytest.approx(0.05), 0.625],
        "other": [pytest.approx(0.2), 0.0],
    }
    assert [bar["y"] for bar in bars] == [[0, 1]] * 4


def test_shares_that_add_up_to_more_than_the_step_leave_nothing_for_the_rest():
    runs = [RunRecord("r", [step(1, shares=(0.8, 0.3, 0.1))])]
    *_, other = figure_titled(figures(runs), "Where the time of a step went").traces
    assert other["x"] == [0.0]


def test_a_share_that_is_no_number_is_left_out_of_the_mean():
    steps = [step(1, shares=(math.nan, 0.4, 0.2)), step(2, shares=(0.5, 0.2, 0.0))]
    compute, *_ = figure_titled(
        figures([RunRecord("r", steps)]), "Where the time of a step went"
    ).traces
    assert compute["x"] == [0.5]


def test_an_evaluation_without_accuracy_draws_no_curve():
    titles = [figure.title for figure in figures([run(accuracy=None)])]
    assert "Accuracy on unseen data" not in titles


def test_a_label_is_escaped_for_plotly_which_reads_tags():
    assert escape_label("<a href='x'>&") == "&lt;a href=&#x27;x&#x27;&gt;&amp;"


def test_a_long_label_is_cut():
    assert escape_label("x" * 500) == "x" * 45 + "..."


def test_a_label_has_no_control_characters():
    assert escape_label("\x1b[31mred\u202e") == "[31mred"

"""The Gantt chart of a few steps."""

import pytest

from stretto.report.figures import gantt_figure
from stretto.report.run_records import RunRecord
from stretto.telemetry.timeline import Span, Timeline
from tests.unit.report.examples import timeline


def chart(*timelines):
    return gantt_figure(RunRecord("r", [], timelines))


def bars(figure):
    return [
        (trace["name"], row, start, text)
        for trace in figure.traces
        for row, start, text in zip(trace["y"], trace["base"], trace["text"], strict=True)
    ]


@pytest.mark.parametrize("timelines", [(), (Timeline(0, ()),)])
def test_without_spans_there_is_no_picture(timelines):
    assert chart(*timelines) is None


def test_three_steps_from_the_middle_are_shown():
    texts = {text for _, _, _, text in bars(chart(timeline(0, steps=9)))}
    assert {text.rpartition(" ")[2] for text in texts} == {"3", "4", "5"}


def test_steps_without_an_evaluation_between_them_are_shown():
    # It lies between steps 4 and 5, so the first three steps in a row after the middle are 5 to 7.
    spans = (*timeline(0, steps=9).spans, Span("evaluate", "compute", 0.485, 0.495))
    texts = {text for _, _, _, text in bars(chart(Timeline(0, spans)))}
    assert {text.rpartition(" ")[2] for text in texts} == {"5", "6", "7"}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_run_is_shown_whole(steps):
    assert len(bars(chart(timeline(0, steps=steps)))) == 2 * steps


def test_spans_outside_of_any_step_are_shown_where_there_are_no_others():
    assert len(bars(chart(Timeline(0, (Span("load", "data", 0.0, 1.0),))))) == 1


def test_compute_stands_above_communication_in_every_rank():
    labels = chart(timeline(0), timeline(1)).layout["yaxis"]["ticktext"]
    assert labels == ["rank 0 compute", "rank 0 comm", "rank 1 compute", "rank 1 comm"]


def test_buckets_of_any_number_are_one_kind():
    assert {name for name, *_ in bars(chart(timeline(0)))} == {"backward", "bucket"}


def test_ranks_with_one_clock_keep_their_offset():
    figure = chart(timeline(0), timeline(1, offset_s=0.01))
    starts = {row: start for name, row, start, _ in reversed(bars(figure)) if name != "bucket"}
    assert starts == {0: 0.0, 2: 10.0}


def test_ranks_with_different_clocks_are_aligned_and_the_caption_says_so():
    figure = chart(timeline(0), timeline(1, offset_s=5000.0))
    starts = {row: start for name, row, start, _ in reversed(bars(figure)) if name != "bucket"}
    assert starts == {0: 0.0, 2: 0.0}
    assert "clocks differ" in figure.caption


def test_only_the_first_of_many_ranks_are_shown_and_the_caption_says_so():
    figure = chart(*(timeline(rank) for rank in range(20)))
    assert len(figure.layout["yaxis"]["ticktext"]) == 16
    assert "first 8 of 20 workers" in figure.caption


def test_kinds_beyond_the_palette_are_still_drawn():
    kinds = [chr(ord("a") + i) * 2 for i in range(12)]
    spans = tuple(Span(kind, "comm", i, i + 1.0) for i, kind in enumerate(kinds))
    assert [trace["name"] for trace in chart(Timeline(0, spans)).traces] == kinds

"""The picture of a few steps."""

import pytest

from stretto.report.gantt import gantt
from stretto.report.records import RunRecord
from stretto.telemetry.timeline import Span, Timeline
from tests.unit.report.made_up import timeline


def picture(*timelines):
    return gantt(RunRecord("r", [], timelines))


def bars(figure):
    return [
        (trace["name"], place, start, text)
        for trace in figure.traces
        for place, start, text in zip(trace["y"], trace["base"], trace["text"], strict=True)
    ]


@pytest.mark.parametrize("timelines", [(), (Timeline(0, ()),)])
def test_without_spans_there_is_no_picture(timelines):
    assert picture(*timelines) is None


def test_three_steps_from_the_middle_are_shown():
    texts = {text for _, _, _, text in bars(picture(timeline(0, steps=9)))}
    assert {text.rpartition(" ")[2] for text in texts} == {"3", "4", "5"}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_run_is_shown_whole(steps):
    assert len(bars(picture(timeline(0, steps=steps)))) == 2 * steps


def test_spans_outside_of_any_step_are_shown_where_there_are_no_others():
    assert len(bars(picture(Timeline(0, (Span("load", "data", 0.0, 1.0),))))) == 1


def test_compute_stands_above_communication_in_every_rank():
    labels = picture(timeline(0), timeline(1)).layout["yaxis"]["ticktext"]
    assert labels == ["rank 0 compute", "rank 0 comm", "rank 1 compute", "rank 1 comm"]


def test_buckets_of_any_number_are_one_kind():
    assert {name for name, *_ in bars(picture(timeline(0)))} == {"backward", "bucket"}


def test_ranks_of_one_clock_keep_their_distance():
    figure = picture(timeline(0), timeline(1, offset_s=0.01))
    starts = {place: start for name, place, start, _ in reversed(bars(figure)) if name != "bucket"}
    assert starts == {0: 0.0, 2: 10.0}


def test_ranks_of_different_clocks_are_laid_on_each_other_and_the_caption_says_so():
    figure = picture(timeline(0), timeline(1, offset_s=5000.0))
    starts = {place: start for name, place, start, _ in reversed(bars(figure)) if name != "bucket"}
    assert starts == {0: 0.0, 2: 0.0}
    assert "clocks differ" in figure.caption


def test_of_many_ranks_the_first_are_shown_and_the_caption_says_so():
    figure = picture(*(timeline(rank) for rank in range(20)))
    assert len(figure.layout["yaxis"]["ticktext"]) == 16
    assert "first 8 of 20 workers" in figure.caption


def test_kinds_beyond_the_palette_are_still_drawn():
    kinds = [chr(ord("a") + i) * 2 for i in range(12)]
    spans = tuple(Span(kind, "comm", i, i + 1.0) for i, kind in enumerate(kinds))
    assert [trace["name"] for trace in picture(Timeline(0, spans)).traces] == kinds

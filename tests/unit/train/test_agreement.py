"""What all ranks know of a step, with ranks as threads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.comm.local import run_local
from stretto.comm.small import gather_text
from stretto.train.agreement import STOP_WORDS, Agreement, Control


def agree(rows, words):
    def work(channel):
        agreement = Agreement(Control(channel, lambda: words[channel.rank]))
        agreement.begin(0, rows[channel.rank])
        return agreement.settled()

    return run_local(len(rows), work)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_samples_are_counted_over_all_ranks(rows):
    assert [each.num_samples for each in agree(rows, [None] * len(rows))] == [sum(rows)] * len(rows)


@pytest.mark.parametrize("word", STOP_WORDS)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_request_to_one_rank_is_heard_by_all_with_its_name(word, rank):
    words = [word if each == rank else None for each in range(3)]
    assert {each.stop for each in agree([1] * 3, words)} == {f"stopped by {word} to rank {rank}"}


def test_requests_to_several_ranks_are_counted():
    told = agree([1] * 3, ["TERM", "USR1", "TERM"])
    assert {each.stop for each in told} == {"stopped by TERM and USR1 to 3 ranks"}


def test_nobody_stops_when_nobody_asked():
    assert {each.stop for each in agree([1] * 3, [None] * 3)} == {""}


def test_an_answer_may_be_asked_for_again():
    def work(channel):
        agreement = Agreement(Control(channel))
        agreement.begin(0, 7)
        return agreement.settled() == agreement.settled()

    assert all(run_local(2, work))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=4))
def test_texts_of_all_ranks_arrive_everywhere_in_order(texts):
    told = run_local(len(texts), lambda channel: gather_text(texts[channel.rank], channel))
    assert told == [texts] * len(texts)

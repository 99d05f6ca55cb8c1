"""Step consensus, with ranks as threads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.comm.in_process_transports import run_threads
from stretto.comm.transport import all_gather_text
from stretto.train.step_consensus import STOP_SIGNAL_NAMES, ControlPlane, StepConsensus


def results_of_step(rows, signals):
    def work(transport):
        consensus = StepConsensus(ControlPlane(transport, lambda: signals[transport.rank]))
        consensus.begin(0, rows[transport.rank])
        return consensus.result()

    return run_threads(len(rows), work)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_samples_are_counted_over_all_ranks(rows):
    assert [each.num_samples for each in results_of_step(rows, [None] * len(rows))] == [
        sum(rows)
    ] * len(rows)


@pytest.mark.parametrize("signal_name", STOP_SIGNAL_NAMES)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_stop_request_to_one_rank_is_known_to_all_with_its_signal(signal_name, rank):
    signals = [signal_name if each == rank else None for each in range(3)]
    assert {each.stop_reason for each in results_of_step([1] * 3, signals)} == {
        f"stopped by {signal_name} to rank {rank}"
    }


def test_stop_requests_to_several_ranks_are_counted():
    results = results_of_step([1] * 3, ["TERM", "USR1", "TERM"])
    assert {each.stop_reason for each in results} == {"stopped by TERM and USR1 to 3 ranks"}


def test_without_a_stop_request_there_is_no_stop_reason():
    assert {each.stop_reason for each in results_of_step([1] * 3, [None] * 3)} == {""}


def test_a_result_can_be_read_again():
    def work(transport):
        consensus = StepConsensus(ControlPlane(transport))
        consensus.begin(0, 7)
        return consensus.result() == consensus.result()

    assert all(run_threads(2, work))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=4))
def test_texts_of_all_ranks_arrive_everywhere_in_order(texts):
    results = run_threads(
        len(texts), lambda transport: all_gather_text(texts[transport.rank], transport)
    )
    assert results == [texts] * len(texts)

import signal
from itertools import product

import pytest

from stretto.cluster.heartbeats import FailureReport
from stretto.launch.root_cause import (
    append_log_tail,
    failure_outcome,
    find_root_cause,
    is_failure,
    is_root_cause_final,
    outcome_after_signal,
    outcome_without_failure,
    signal_name,
)

TERM, HUP = signal.SIGTERM, signal.SIGHUP
SILENT = FailureReport(2, "rank 2 silent for 30 s, last heartbeat at step 17", "silent")
FAILED = FailureReport(2, "no room\nleft", "failed")


def of_three(*codes):
    return [dict(enumerate(chosen)) for chosen in product(codes, repeat=3)]


@pytest.mark.parametrize(
    ("ended", "blamed"),
    [
        ({}, None),
        ({0: 0, 1: 0}, None),
        ({0: 0, 2: 1, 1: 3}, 1),
        ({0: 1, 2: -9, 3: 1}, 2),
        ({0: 1, 2: -9, 1: -6}, 1),
    ],
)
def test_the_lowest_failed_rank_is_the_cause_unless_one_was_killed(ended, blamed):
    assert find_root_cause(ended) == blamed


@pytest.mark.parametrize("failure_report", [None, SILENT, FAILED])
def test_there_is_no_cause_while_no_ended_rank_failed(failure_report):
    assert [find_root_cause(ended, failure_report) for ended in of_three(0, 75)] == [None] * 8


@pytest.mark.parametrize(
    ("ended", "failure_report", "blamed"),
    [
        ({0: 1, 1: 1}, SILENT, 2),
        ({0: 1, 1: -9}, SILENT, 2),
        ({0: 1, 1: 1, 2: -9}, SILENT, 2),
        ({0: 1, 1: -9, 2: 1}, SILENT, 1),
        ({0: 1}, FAILED, 2),
        ({0: 1, 2: 3}, FAILED, 2),
        ({0: 1, 1: -11, 2: 1}, FAILED, 1),
    ],
)
def test_a_silent_rank_has_priority_over_a_killed_one_and_that_over_a_report(
    ended, failure_report, blamed
):
    assert find_root_cause(ended, failure_report) == blamed


@pytest.mark.parametrize(
    ("ended", "running", "failure_report", "is_final"),
    [
        ({0: 1}, [1, 2], None, False),
        ({0: 1}, [1, 2], SILENT, True),
        ({0: 1}, [1, 2], FAILED, False),
        ({0: 1, 2: 1}, [1], FAILED, True),
        ({0: 1, 1: -9}, [2], None, True),
        ({0: 1, 1: 0, 2: 75}, [], None, True),
    ],
)
def test_the_decision_waits_only_while_another_cause_is_possible(
    ended, running, failure_report, is_final
):
    assert is_root_cause_final(ended, running, failure_report) is is_final


@pytest.mark.parametrize("ended", of_three(0, 75))
def test_one_rank_that_saved_and_stopped_makes_the_run_stopped(ended):
    assert outcome_without_failure(ended).exit_code == (75 if 75 in ended.values() else 0)


@pytest.mark.parametrize("ended", [e for e in of_three(0, 75, 1, -15) if any(e.values())])
def test_a_signal_gives_75_only_if_a_rank_saved_and_none_failed(ended):
    outcome = outcome_after_signal(TERM, TERM, ended, killed=[])
    saved = 75 in ended.values() and not any(is_failure(code) for code in ended.values())
    assert outcome.exit_code == (75 if saved else 128 + 15)
    assert outcome.reason.startswith("stopped by TERM after saving" if saved else "ended by TERM")


def test_a_signal_after_the_work_was_done_changes_nothing():
    assert outcome_after_signal(TERM, TERM, {0: 0, 1: 0}, killed=[]).exit_code == 0


def test_a_killed_rank_did_not_save():
    outcome = outcome_after_signal(TERM, TERM, {0: 75}, killed=[1, 2])
    assert outcome.exit_code == 128 + 15
    assert outcome.reason == "ended by TERM; ranks 1-2 did not end in time and had to be killed"


@pytest.mark.parametrize(("second", "expected"), [(TERM, "the second TERM"), (HUP, "HUP")])
def test_ranks_killed_by_a_second_signal_are_not_reported_as_too_slow(second, expected):
    outcome = outcome_after_signal(TERM, TERM, {0: 75}, killed=[1, 2], second=second)
    assert outcome.exit_code == 128 + 15
    assert outcome.reason == f"ended by TERM; ranks 1-2 killed at once on {expected}"


def test_a_second_signal_that_killed_no_rank_changes_nothing():
    outcome = outcome_after_signal(TERM, TERM, {0: 75, 1: 75}, killed=[], second=TERM)
    assert outcome == outcome_after_signal(TERM, TERM, {0: 75, 1: 75}, killed=[])


@pytest.mark.parametrize(
    ("ended", "expected"),
    [({0: 75, 1: 1}, "; rank 1 ended with exit code 1"), ({0: -15, 1: 143}, "")],
)
def test_a_rank_that_failed_while_saving_is_named_but_not_one_killed_by_the_signal(ended, expected):
    assert outcome_after_signal(HUP, TERM, ended, killed=[]).reason == f"ended by HUP{expected}"


@pytest.mark.parametrize(
    ("ended", "failure_report", "exit_code", "reason"),
    [
        ({0: 3}, None, 3, "X ended with exit code 3"),
        ({0: -9}, None, 137, "X ended with signal KILL"),
        ({0: 1}, SILENT, 1, "rank 2 silent for 30 s, last heartbeat at step 17"),
        ({0: 1, 2: 2}, FAILED, 2, "X failed: no room left"),
        ({0: 3}, FAILED, 3, "X failed: no room left"),
        ({0: 1, 2: -9}, SILENT, 137, "X ended with signal KILL"),
        ({0: 1, 2: 75}, FAILED, 1, "X failed: no room left"),
    ],
)
def test_a_failure_has_the_code_and_reason_of_its_cause(ended, failure_report, exit_code, reason):
    outcome = failure_outcome("X", ended, failure_report)
    assert (outcome.exit_code, outcome.reason) == (exit_code, reason)


@pytest.mark.parametrize(
    ("ended", "failure_report", "short_reason"),
    [
        ({0: 3}, None, "X ended with exit code 3"),
        ({0: 1}, SILENT, "X is silent"),
        ({2: 2}, FAILED, "X failed"),
    ],
)
def test_the_short_reason_leaves_out_the_reported_message(ended, failure_report, short_reason):
    assert failure_outcome("X", ended, failure_report).short_reason == short_reason


def reason_with_log(reason, *said):
    """Return the reason of an outcome if rank 2 reported ``reason`` and its log ends with
    ``said``.
    """
    outcome = failure_outcome("rank 2", {2: 1}, FailureReport(2, reason, "failed"))
    return append_log_tail(outcome, "LOG", "\n".join(said))


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "soup.py", line 3, in cook',
    "    stir()",
)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("no room", ["step 1", "stretto: no room"]),
        ("two things:\n  one\n  two", ["step 1", "stretto: two things:", "  one", "  two"]),
        ("OSError: [Errno 28] no room", ["stretto: [Errno 28] no room"]),
    ],
)
def test_a_log_that_ends_with_the_reason_is_named_but_not_quoted(reason, said):
    expected = reason.replace("\n", " ")
    assert reason_with_log(reason, *said) == f"rank 2 failed: {expected}; its log is LOG"


@pytest.mark.parametrize(
    ("reason", "line"), [("KeyError: 'salt'", "KeyError: 'salt'"), ("KeyError: ", "KeyError")]
)
def test_a_traceback_is_quoted_and_contains_the_reason(reason, line):
    expected = "\n".join([*TRACEBACK, line])
    assert (
        reason_with_log(reason, *TRACEBACK, line) == f"rank 2 failed; the end of LOG:\n{expected}"
    )


@pytest.mark.parametrize("said", ["step 17", "stretto: no room left", "stretto: "])
def test_a_log_that_does_not_end_with_the_reason_is_quoted(said):
    assert reason_with_log("no room", said) == f"rank 2 failed: no room; the end of LOG:\n{said}"


@pytest.mark.parametrize(("ended", "failure_report"), [({2: -9}, None), ({0: 1}, SILENT)])
def test_the_log_of_a_rank_without_a_report_is_quoted(ended, failure_report):
    outcome = failure_outcome("rank 2", ended, failure_report)
    expected = append_log_tail(outcome, "LOG", "stretto: step 17")
    assert expected == f"{outcome.reason}; the end of LOG:\nstretto: step 17"


def test_a_signal_without_a_name_is_shown_by_number():
    assert (signal_name(signal.SIGKILL), signal_name(40)) == ("KILL", "40")

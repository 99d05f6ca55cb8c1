import signal
from itertools import product

import pytest

from stretto.cluster.beats import Verdict
from stretto.launch.judgement import (
    after_signal,
    culprit,
    failure,
    is_failure,
    is_settled,
    signal_name,
    with_last_words,
    without_failure,
)

TERM, HUP = signal.SIGTERM, signal.SIGHUP
SILENT = Verdict(2, "rank 2 silent for 30 s, last heard of at step 17", "silent")
FAILED = Verdict(2, "no room\nleft", "failed")


def of_three(*codes):
    return [dict(enumerate(chosen)) for chosen in product(codes, repeat=3)]


@pytest.mark.parametrize(
    ("ended", "blamed"),
    [({}, None), ({0: 0, 1: 0}, None), ({0: 0, 2: 1, 1: 3}, 1), ({0: 1, 2: -9, 3: 1}, 2)],
)
def test_the_lowest_failed_rank_is_blamed_unless_one_was_killed(ended, blamed):
    assert culprit(ended) == blamed


@pytest.mark.parametrize("verdict", [None, SILENT, FAILED])
def test_nobody_is_blamed_while_all_that_ended_did_so_well(verdict):
    assert [culprit(ended, verdict) for ended in of_three(0, 75)] == [None] * 8


@pytest.mark.parametrize(
    ("ended", "verdict", "blamed"),
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
def test_a_rank_that_hangs_comes_before_one_that_was_killed_and_that_before_a_word(
    ended, verdict, blamed
):
    assert culprit(ended, verdict) == blamed


@pytest.mark.parametrize(
    ("ended", "running", "verdict", "settled"),
    [
        ({0: 1}, [1, 2], None, False),
        ({0: 1}, [1, 2], SILENT, True),
        ({0: 1}, [1, 2], FAILED, False),
        ({0: 1, 2: 1}, [1], FAILED, True),
        ({0: 1, 1: -9}, [2], None, True),
        ({0: 1, 1: 0, 2: 75}, [], None, True),
    ],
)
def test_judgement_waits_only_while_another_culprit_may_turn_up(ended, running, verdict, settled):
    assert is_settled(ended, running, verdict) is settled


@pytest.mark.parametrize("ended", of_three(0, 75))
def test_one_that_saved_and_stopped_makes_the_whole_run_stopped(ended):
    assert without_failure(ended).exit_code == (75 if 75 in ended.values() else 0)


@pytest.mark.parametrize("ended", [e for e in of_three(0, 75, 1, -15) if any(e.values())])
def test_a_signal_ends_with_75_only_if_somebody_saved_and_nobody_failed(ended):
    outcome = after_signal(TERM, TERM, ended, killed=[])
    saved = 75 in ended.values() and not any(is_failure(code) for code in ended.values())
    assert outcome.exit_code == (75 if saved else 128 + 15)
    assert outcome.reason.startswith("stopped by TERM after saving" if saved else "ended by TERM")


def test_a_signal_that_came_when_the_work_was_done_changes_nothing():
    assert after_signal(TERM, TERM, {0: 0, 1: 0}, killed=[]).exit_code == 0


def test_a_rank_that_had_to_be_killed_did_not_save():
    outcome = after_signal(TERM, TERM, {0: 75}, killed=[1, 2])
    assert outcome.exit_code == 128 + 15
    assert outcome.reason == "ended by TERM; ranks 1-2 did not end in time and had to be killed"


@pytest.mark.parametrize(("second", "told"), [(TERM, "the second TERM"), (HUP, "HUP")])
def test_who_is_killed_on_a_second_signal_did_not_take_too_long(second, told):
    outcome = after_signal(TERM, TERM, {0: 75}, killed=[1, 2], second=second)
    assert outcome.exit_code == 128 + 15
    assert outcome.reason == f"ended by TERM; ranks 1-2 killed at once on {told}"


def test_a_second_signal_that_killed_nobody_changes_nothing():
    outcome = after_signal(TERM, TERM, {0: 75, 1: 75}, killed=[], second=TERM)
    assert outcome == after_signal(TERM, TERM, {0: 75, 1: 75}, killed=[])


@pytest.mark.parametrize(
    ("ended", "told"),
    [({0: 75, 1: 1}, "; rank 1 ended with exit code 1"), ({0: -15, 1: 143}, "")],
)
def test_who_failed_while_saving_is_named_but_not_who_died_of_the_signal(ended, told):
    assert after_signal(HUP, TERM, ended, killed=[]).reason == f"ended by HUP{told}"


@pytest.mark.parametrize(
    ("ended", "verdict", "exit_code", "reason"),
    [
        ({0: 3}, None, 3, "X ended with exit code 3"),
        ({0: -9}, None, 137, "X ended with signal KILL"),
        ({0: 1}, SILENT, 1, "rank 2 silent for 30 s, last heard of at step 17"),
        ({0: 1, 2: 2}, FAILED, 2, "X failed: no room left"),
        ({0: 3}, FAILED, 3, "X failed: no room left"),
        ({0: 1, 2: -9}, SILENT, 137, "X ended with signal KILL"),
        ({0: 1, 2: 75}, FAILED, 1, "X failed: no room left"),
    ],
)
def test_a_failure_has_the_culprit_s_code_and_word(ended, verdict, exit_code, reason):
    outcome = failure("X", ended, verdict)
    assert (outcome.exit_code, outcome.reason) == (exit_code, reason)


@pytest.mark.parametrize(
    ("ended", "verdict", "brief"),
    [
        ({0: 3}, None, "X ended with exit code 3"),
        ({0: 1}, SILENT, "X is silent"),
        ({2: 2}, FAILED, "X failed"),
    ],
)
def test_a_failure_is_told_in_brief_without_the_word_that_a_rank_left(ended, verdict, brief):
    assert failure("X", ended, verdict).brief == brief


def last_words(reason, *said):
    """Return what follows when rank 2 left ``reason`` as its word and ``said`` in its log."""
    outcome = failure("rank 2", {2: 1}, Verdict(2, reason, "failed"))
    return with_last_words(outcome, "LOG", "\n".join(said))


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
def test_a_log_that_ends_with_the_reason_is_named_but_not_repeated(reason, said):
    told = reason.replace("\n", " ")
    assert last_words(reason, *said) == f"rank 2 failed: {told}; its log is LOG"


@pytest.mark.parametrize(
    ("reason", "line"), [("KeyError: 'salt'", "KeyError: 'salt'"), ("KeyError: ", "KeyError")]
)
def test_a_traceback_is_repeated_and_says_the_reason_itself(reason, line):
    told = "\n".join([*TRACEBACK, line])
    assert last_words(reason, *TRACEBACK, line) == f"rank 2 failed; the end of LOG:\n{told}"


@pytest.mark.parametrize("said", ["step 17", "stretto: no room left", "stretto: "])
def test_a_log_that_ends_otherwise_than_the_reason_is_repeated(said):
    assert last_words("no room", said) == f"rank 2 failed: no room; the end of LOG:\n{said}"


@pytest.mark.parametrize(("ended", "verdict"), [({2: -9}, None), ({0: 1}, SILENT)])
def test_the_log_of_a_rank_that_left_no_word_is_repeated(ended, verdict):
    outcome = failure("rank 2", ended, verdict)
    told = with_last_words(outcome, "LOG", "stretto: step 17")
    assert told == f"{outcome.reason}; the end of LOG:\nstretto: step 17"


def test_a_signal_without_a_name_is_its_number():
    assert (signal_name(signal.SIGKILL), signal_name(40)) == ("KILL", "40")

"""Find the worker that caused a failure, and the exit code of the run; pure functions.

Codes are as in `subprocess`: above zero an exit code, below zero minus the signal that killed it.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stretto.errors import STOPPED_EXIT_CODE
from stretto.launch.worker_group import LaunchOutcome
from stretto.telemetry.event_text import ranks_text, strip_unprintable

if TYPE_CHECKING:  # it imports torch, which the launcher of a lab does not need
    from stretto.cluster.heartbeats import FailureReport

RESUME_HINT = "go on with --resume"


def is_failure(code: int) -> bool:
    """Return whether ``code`` is a failure; 0 and the code for saved and stopped are not."""
    return code not in (0, STOPPED_EXIT_CODE)


def find_root_cause(
    exit_codes: Mapping[int, int], failure_report: "FailureReport | None" = None
) -> int | None:
    """Return the rank that caused the failures; None if no worker failed.

    A rank that hangs still runs while its victims end. A rank killed by a signal posts no report;
    others then fail because it no longer answers, and some of them may have posted one.
    """
    failed = {rank: code for rank, code in exit_codes.items() if is_failure(code)}
    if not failed:
        return None
    if (
        failure_report is not None
        and failure_report.kind == "silent"
        and failure_report.rank not in exit_codes
    ):
        return failure_report.rank
    killed = [rank for rank, code in failed.items() if code < 0]
    if killed:
        return min(killed)
    return failure_report.rank if failure_report is not None else min(failed)


def is_root_cause_final(
    exit_codes: Mapping[int, int], running: Sequence[int], failure_report: "FailureReport | None"
) -> bool:
    """Return whether waiting longer could not change the result of `find_root_cause`."""
    if not running or any(code < 0 for code in exit_codes.values()):
        return True
    return failure_report is not None and (
        failure_report.kind == "silent" or failure_report.rank in exit_codes
    )


def failure_outcome(
    title: str, exit_codes: Mapping[int, int], failure_report: "FailureReport | None"
) -> LaunchOutcome:
    """Return the outcome of a run whose root cause is the worker called ``title``.

    If that worker is still running (it hangs, or has only posted its report so far), the exit code
    is that of its victims.
    """
    rank, victim_rank = find_root_cause(exit_codes, failure_report), find_root_cause(exit_codes)
    assert rank is not None
    assert victim_rank is not None
    code = exit_codes.get(rank, 0)
    if not is_failure(code):
        code = exit_codes[victim_rank]
    exit_code = code if code > 0 else 128 - code
    if failure_report is None or failure_report.rank != rank or exit_codes.get(rank, 0) < 0:
        description = f"{title} ended with {describe_exit(code)}"
        return LaunchOutcome(exit_code, rank, description, description)
    reason = strip_unprintable(failure_report.reason)
    if failure_report.kind == "silent":
        return LaunchOutcome(exit_code, rank, reason, f"{title} is silent")
    return LaunchOutcome(exit_code, rank, f"{title} failed: {reason}", f"{title} failed")


def append_log_tail(outcome: LaunchOutcome, log: str, log_tail: str) -> str:
    """Return the reason for a failure with ``log_tail``, the end of the failed worker's log.

    If the log ends with the reason, only one of the two is shown: the log if it has a traceback,
    else the reason.
    """
    if not log_tail:
        return f"{outcome.reason}; it said nothing"
    _, has_message, message = outcome.reason.partition(f"{outcome.short_reason}: ")
    if not (has_message and _ends_with(log_tail, message)):
        return f"{outcome.reason}; the end of {log}:\n{log_tail}"
    if any(line.startswith('  File "') for line in log_tail.splitlines()):
        return f"{outcome.short_reason}; the end of {log}:\n{log_tail}"
    return f"{outcome.reason}; its log is {log}"


def _ends_with(log_tail: str, reason: str) -> bool:
    """Return whether a log ends with the reason that the rank reported for its failure."""
    whole, reason = log_tail.replace("\n", " "), reason.rstrip(" :")  # an error may have no text
    # A command prints an error without its type; the reason may begin with the type.
    _, separator, message = whole.rpartition("stretto: ")
    return whole.endswith(reason) or bool(separator and message and reason.endswith(message))


def outcome_without_failure(exit_codes: Mapping[int, int]) -> LaunchOutcome:
    """Return the outcome if all workers ended by themselves and none failed."""
    if STOPPED_EXIT_CODE in exit_codes.values():
        return LaunchOutcome(
            STOPPED_EXIT_CODE, reason=f"stopped on request after saving; {RESUME_HINT}"
        )
    return LaunchOutcome(0)


def outcome_after_signal(
    received: int,
    forwarded_signal: int,
    exit_codes: Mapping[int, int],
    killed: Sequence[int],
    second: int | None = None,
) -> LaunchOutcome:
    """Return the outcome after the launcher forwarded a signal and waited for the workers.

    Args:
        received: The signal to the launcher.
        forwarded_signal: The signal sent to the workers.
        exit_codes: Codes of the workers that ended in time, by rank.
        killed: The ranks that did not end in time and were killed.
        second: The signal that ended the waiting time early, if there was one.
    """
    name = signal_name(received)
    if not killed and set(exit_codes.values()) == {0}:
        return LaunchOutcome(0)  # the signal arrived after the work was done
    if not killed and set(exit_codes.values()) in ({STOPPED_EXIT_CODE}, {0, STOPPED_EXIT_CODE}):
        return LaunchOutcome(
            STOPPED_EXIT_CODE, reason=f"stopped by {name} after saving; {RESUME_HINT}"
        )
    reason = f"ended by {name}"
    expected_codes = (-forwarded_signal, 128 + forwarded_signal)
    others = {rank: code for rank, code in exit_codes.items() if code not in expected_codes}
    if (rank := find_root_cause(others)) is not None:
        reason += f"; rank {rank} ended with {describe_exit(others[rank])}"
    if killed:
        reason += f"; {ranks_text(killed)} {_why_killed(received, second)}"
    return LaunchOutcome(128 + received, reason=reason)


def _why_killed(received: int, second: int | None) -> str:
    if second is None:
        return "did not end in time and had to be killed"
    again = "the second " if second == received else ""
    return f"killed at once on {again}{signal_name(second)}"


def describe_exit(code: int) -> str:
    """Return how a process ended whose code is not 0, as text."""
    return f"exit code {code}" if code > 0 else f"signal {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Return a signal's name, as in ``TERM``; real-time signals have only numbers."""
    names = {each.value: each.name.removeprefix("SIG") for each in signal.Signals}
    return names.get(number, str(number))

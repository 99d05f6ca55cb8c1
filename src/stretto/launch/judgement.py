"""Who broke a run, and what its exit code is: judged from how workers ended, without effects.

Codes are a process's own: above zero an exit code, below zero the signal that killed it.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stretto.errors import STOPPED_EXIT_CODE
from stretto.launch.processes import Outcome
from stretto.telemetry.wording import printable, ranks_in_words

if TYPE_CHECKING:  # at run time it brings torch along, which a launcher in a lab does not need
    from stretto.cluster.beats import Verdict

GO_ON = "go on with --resume"


def is_failure(code: int) -> bool:
    """Say whether a worker that ended with ``code`` failed: not if it saved and stopped."""
    return code not in (0, STOPPED_EXIT_CODE)


def culprit(ended: Mapping[int, int], verdict: "Verdict | None" = None) -> int | None:
    """Return the rank to blame for failures among those that ended, None if there are none.

    A rank that hangs still runs while its victims end. One that was killed by a signal leaves no
    word, and others fail because it no longer answers; some of them may have left one.
    """
    failed = {rank: code for rank, code in ended.items() if is_failure(code)}
    if not failed:
        return None
    if verdict is not None and verdict.kind == "silent" and verdict.rank not in ended:
        return verdict.rank
    killed = [rank for rank, code in failed.items() if code < 0]
    if killed:
        return min(killed)
    return verdict.rank if verdict is not None else min(failed)


def is_settled(ended: Mapping[int, int], running: Sequence[int], verdict: "Verdict | None") -> bool:
    """Say whether waiting a little longer could no longer change who is the culprit."""
    if not running or any(code < 0 for code in ended.values()):
        return True
    return verdict is not None and (verdict.kind == "silent" or verdict.rank in ended)


def failure(title: str, ended: Mapping[int, int], verdict: "Verdict | None") -> Outcome:
    """Return the outcome of a run that the culprit, called ``title``, broke.

    While it still runs (it hangs, or has only left its word yet) the code is that of its victims.
    """
    rank, victim = culprit(ended, verdict), culprit(ended)
    assert rank is not None
    assert victim is not None
    code = ended.get(rank, 0)
    if not is_failure(code):
        code = ended[victim]
    exit_code = code if code > 0 else 128 - code
    if verdict is None or verdict.rank != rank or ended.get(rank, 0) < 0:
        ended_so = f"{title} ended with {describe(code)}"
        return Outcome(exit_code, rank, ended_so, ended_so)
    reason = printable(verdict.reason)
    if verdict.kind == "silent":
        return Outcome(exit_code, rank, reason, f"{title} is silent")
    return Outcome(exit_code, rank, f"{title} failed: {reason}", f"{title} failed")


def with_last_words(outcome: Outcome, log: str, said: str) -> str:
    """Return the reason for a failure together with ``said``, the end of the culprit's log.

    Where the log ends with the reason, one of the two is enough: the log if it is a traceback,
    which tells more, else the reason.
    """
    if not said:
        return f"{outcome.reason}; it said nothing"
    _, is_left, word = outcome.reason.partition(f"{outcome.brief}: ")
    if not (is_left and _ends_with(said, word)):
        return f"{outcome.reason}; the end of {log}:\n{said}"
    if any(line.startswith('  File "') for line in said.splitlines()):
        return f"{outcome.brief}; the end of {log}:\n{said}"
    return f"{outcome.reason}; its log is {log}"


def _ends_with(said: str, reason: str) -> bool:
    """Say whether a log ends with the reason that a rank left for its failure."""
    whole, reason = said.replace("\n", " "), reason.rstrip(" :")  # an error may have no words
    # A command's own word leaves out of which type an error was, which the reason may begin with.
    _, own, word = whole.rpartition("stretto: ")
    return whole.endswith(reason) or bool(own and word and reason.endswith(word))


def without_failure(ended: Mapping[int, int]) -> Outcome:
    """Return the outcome when all ended by themselves and none failed."""
    if STOPPED_EXIT_CODE in ended.values():
        return Outcome(STOPPED_EXIT_CODE, reason=f"stopped on request after saving; {GO_ON}")
    return Outcome(0)


def after_signal(
    received: int,
    passed_on: int,
    ended: Mapping[int, int],
    killed: Sequence[int],
    second: int | None = None,
) -> Outcome:
    """Return the outcome once a signal to the launcher was passed on and time was given.

    Args:
        received: the signal to the launcher.
        passed_on: what the workers were sent for it.
        ended: how those ended that did.
        killed: the ranks that did not, and had to be killed.
        second: the signal that cut their time short, if one did.
    """
    name = signal_name(received)
    if not killed and set(ended.values()) == {0}:
        return Outcome(0)  # it came when the work was done
    if not killed and set(ended.values()) in ({STOPPED_EXIT_CODE}, {0, STOPPED_EXIT_CODE}):
        return Outcome(STOPPED_EXIT_CODE, reason=f"stopped by {name} after saving; {GO_ON}")
    reason = f"ended by {name}"
    died_of_it = (-passed_on, 128 + passed_on)
    others = {rank: code for rank, code in ended.items() if code not in died_of_it}
    if (rank := culprit(others)) is not None:
        reason += f"; rank {rank} ended with {describe(others[rank])}"
    if killed:
        reason += f"; {ranks_in_words(killed)} {_why_killed(received, second)}"
    return Outcome(128 + received, reason=reason)


def _why_killed(received: int, second: int | None) -> str:
    if second is None:
        return "did not end in time and had to be killed"
    again = "the second " if second == received else ""
    return f"killed at once on {again}{signal_name(second)}"


def describe(code: int) -> str:
    """Return how a process ended that did not end with 0."""
    return f"exit code {code}" if code > 0 else f"signal {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Return a signal's name, as in ``TERM``; real-time signals have numbers only."""
    names = {known.value: known.name.removeprefix("SIG") for known in signal.Signals}
    return names.get(number, str(number))

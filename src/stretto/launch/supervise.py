"""Supervise workers: start them, forward signals, and find the one that broke the run."""

import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto.errors import STOPPED_EXIT_CODE, LaunchError
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
from stretto.launch.worker_group import (
    LaunchOutcome,
    SignalWaiter,
    WorkerGroup,
    WorkerSpec,
    catch_signals,
    read_tail,
)
from stretto.launch.worker_output import ConsoleStreams, WorkerOutput

if TYPE_CHECKING:  # it imports torch, which the launcher of a lab does not need
    from stretto.cluster.heartbeats import FailureReport

_POLL_INTERVAL_S = 0.05
"""Seconds between two reads of the failure report, whose arrival causes no event."""


@dataclass(frozen=True, slots=True)
class LauncherTimeouts:
    """How long a launcher waits for its workers, in seconds."""

    saving_s: float = 60.0
    """From a stop request, or the first worker that saved and stopped, to the end of the last."""
    failing_s: float = 5.0
    """From a failure to the kill of the others, most of which wait for the failed one."""
    root_cause_s: float = 0.5
    """From a failure to the decision on its cause; a victim may end before its cause does."""


DEFAULT_TIMEOUTS = LauncherTimeouts()


def run_workers(
    workers: Sequence[WorkerSpec],
    *,
    log_line: Callable[[str], None],
    timeouts: LauncherTimeouts = DEFAULT_TIMEOUTS,
    signals: SignalWaiter | None = None,
    console_streams: ConsoleStreams | None = None,
    failure_report: "Callable[[], FailureReport | None] | None" = None,
) -> LaunchOutcome:
    """Start all workers and wait for them; the first failure, or a signal to us, ends the rest.

    A signal to us is forwarded to the workers (HUP as TERM), which may save before they end. A
    second one kills them at once. Call this from the main thread, because the parent-death signal
    follows the thread that started the worker.

    The exit code of the outcome is:

    - 0 if all ended with 0.
    - 75 if some ended with 75 and the others with 0 or 75: they were asked to stop, have saved and
      can be resumed.
    - 128 + s if signal s to us ended them otherwise.
    - Otherwise that of the worker that caused the failure: its exit code, 128 + s if signal s
      killed it, or the code of its victims if it hung.

    Args:
        workers: The workers to start; if a program is not found, a `LaunchError` is raised before
            any starts.
        log_line: Called at once with one line that says why the workers are being ended.
        timeouts: How long to wait before workers are killed.
        signals: The caller's own `SignalWaiter`, if it has one.
        console_streams: Where to show the output of workers that have a log; without it the output
            goes to the logs only.
        failure_report: Returns, without waiting, the report that a rank posted about the failure.
    """
    _require_programs(workers, log_line)
    by_rank = {worker.rank: worker for worker in workers}
    output = WorkerOutput({worker.rank: worker.log for worker in workers}, console_streams)
    with ExitStack() as stack:
        worker_group = WorkerGroup(signals or stack.enter_context(catch_signals()), output)
        stack.callback(output.close)
        stack.callback(worker_group.terminate, timeouts.failing_s)
        for worker in workers:
            if not worker_group.signals.received:
                worker_group.start(worker)
        outcome = _Supervisor(
            worker_group, by_rank, timeouts, log_line, failure_report or _no_failure_report
        ).outcome()
    return _append_log_tail(outcome, by_rank)


def _require_programs(workers: Sequence[WorkerSpec], log_line: Callable[[str], None]) -> None:
    for worker in workers:
        if shutil.which(worker.argv[0]) is None:
            raise LaunchError(
                f"cannot start workers: no program {worker.argv[0]!r} on PATH; check its spelling, "
                "or give its full path"
            )
    if not shutil.which("setpriv"):
        log_line("setpriv (util-linux) is not installed: workers would outlive a killed launcher")


def _no_failure_report() -> None:
    """Return None: without a store there are no failure reports."""


@dataclass(frozen=True, slots=True)
class _Supervisor:
    worker_group: WorkerGroup
    workers: Mapping[int, WorkerSpec]
    timeouts: LauncherTimeouts
    say: Callable[[str], None]
    failure_report: "Callable[[], FailureReport | None]"

    def outcome(self) -> LaunchOutcome:
        """Wait until the run is over or must be ended, and return its outcome."""
        worker_group, received = self.worker_group, self.worker_group.signals.received
        worker_group.wait(
            lambda: (
                self._must_stop_waiting() or STOPPED_EXIT_CODE in worker_group.exit_codes.values()
            )
        )
        # All ranks save and stop together, so the others are about to end as well.
        worker_group.wait(self._must_stop_waiting, self.timeouts.saving_s)
        if self._has_failed() and not received:
            worker_group.wait(
                self._is_root_cause_final, self.timeouts.root_cause_s, every_s=_POLL_INTERVAL_S
            )
        if received:
            return self._forward_signal(received[0])
        if self._has_failed():
            return self._fail()
        if worker_group.running:
            return self._give_up()
        return outcome_without_failure(worker_group.exit_codes)

    def _has_failed(self) -> bool:
        return any(is_failure(code) for code in self.worker_group.exit_codes.values())

    def _must_stop_waiting(self) -> bool:
        """Return whether all workers ended, one failed, or a signal arrived."""
        return (
            bool(self.worker_group.signals.received)
            or self._has_failed()
            or not self.worker_group.running
        )

    def _is_root_cause_final(self) -> bool:
        worker_group = self.worker_group
        return bool(worker_group.signals.received) or is_root_cause_final(
            worker_group.exit_codes, worker_group.running, self.failure_report()
        )

    def _forward_signal(self, received: int) -> LaunchOutcome:
        """Forward a signal to the workers and give them time to save; a second one kills them."""
        worker_group, num_seen = self.worker_group, len(self.worker_group.signals.received)
        # To most programs HUP means that their terminal is gone; workers have no terminal.
        forwarded_signal = signal.SIGTERM if received == signal.SIGHUP else received
        self._say(f"received {signal_name(received)}: passing it on")
        worker_group.send_signal(forwarded_signal)

        def is_over() -> bool:
            return len(worker_group.signals.received) > num_seen or not worker_group.running

        worker_group.wait(lambda: is_over() or self._has_failed(), self.timeouts.saving_s)
        # Once one of them failed, the others cannot agree on a step to save at.
        worker_group.wait(is_over, self.timeouts.failing_s if self._has_failed() else 0)
        second, running = (
            next(iter(worker_group.signals.received[num_seen:]), None),
            worker_group.running,
        )
        worker_group.kill()
        # Some may have saved and ended between our last look and the kill.
        killed = [rank for rank in running if worker_group.exit_codes[rank] == -signal.SIGKILL]
        ended = {rank: code for rank, code in worker_group.exit_codes.items() if rank not in killed}
        return outcome_after_signal(received, forwarded_signal, ended, killed, second)

    def _fail(self) -> LaunchOutcome:
        exit_codes, failure_report = self.worker_group.exit_codes, self.failure_report()
        rank = find_root_cause(exit_codes, failure_report)
        assert rank is not None, "nobody has failed"
        outcome = failure_outcome(self.workers[rank].title, exit_codes, failure_report)
        # The short reason is enough: the worker's output is on the screen and in the outcome.
        self._say(f"{outcome.short_reason}; ending the others")
        return outcome

    def _give_up(self) -> LaunchOutcome:
        """Return the outcome if some workers have saved and stopped but others keep running."""
        rank = min(self.worker_group.running)
        reason = (
            f"{self.workers[rank].title} did not end within {self.timeouts.saving_s:g} s of the "
            "first that saved and stopped"
        )
        self._say(f"{reason}; ending it")
        return LaunchOutcome(1, rank, reason, short_reason=reason)

    def _say(self, line: str) -> None:
        # A closed terminal must not keep the workers from saving.
        with suppress(OSError):
            self.say(line)


def _append_log_tail(outcome: LaunchOutcome, workers: Mapping[int, WorkerSpec]) -> LaunchOutcome:
    """Add the end of the failed worker's log; all workers have ended, so the log is complete."""
    if outcome.failed_rank is None:
        return outcome
    log = workers[outcome.failed_rank].log
    if log is None:
        return replace(outcome, reason=f"{outcome.reason}; its output is above")
    return replace(outcome, reason=append_log_tail(outcome, str(log), read_tail(log)))

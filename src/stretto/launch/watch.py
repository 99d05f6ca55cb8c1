"""Run workers to their end: pass on what asks them to stop, name the one that broke the run."""

import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stretto.errors import STOPPED_EXIT_CODE, LaunchError
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
from stretto.launch.pipes import Output, Screen
from stretto.launch.processes import (
    Bell,
    Crew,
    Outcome,
    Worker,
    listening,
    tail,
)

if TYPE_CHECKING:  # at run time it brings torch along, which a launcher in a lab does not need
    from stretto.cluster.beats import Verdict

_LOOK_S = 0.05
"""Between two looks for a verdict, of which nothing tells us when it comes."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a launcher waits for its workers."""

    saving_s: float = 60.0
    """From a request to stop, or the first worker that has, to the end of the last."""
    failing_s: float = 5.0
    """From a failure to the kill of the others: most are stuck waiting for the one that failed."""
    blaming_s: float = 0.5
    """From a failure to its judgement: a victim may end before the culprit, or before its word."""


PATIENCE = Patience()


def run_workers(
    workers: Sequence[Worker],
    *,
    say: Callable[[str], None],
    patience: Patience = PATIENCE,
    bell: Bell | None = None,
    screen: Screen | None = None,
    verdict: "Callable[[], Verdict | None] | None" = None,
) -> Outcome:
    """Start all workers, wait for all; the first failure, or a signal to us, ends the rest.

    A signal to us is passed on to the workers (HUP as TERM), which may save before they end; a
    second one kills them at once. Call it from the main thread: the parent-death signal follows
    the thread that started the worker.

    Exit codes of the outcome: 0 when all ended with 0. 75 when some ended with 75 and the others
    with 0 or 75: they were asked to stop, saved, and can go on. 128 + s when signal s to us ended
    them otherwise. Else somebody failed, and it is the culprit's code: its exit code, 128 + s if
    signal s killed it, that of its victims if it hung.

    Args:
        workers: what to start; a program that is not found is a `LaunchError` before any starts.
        say: told at once, in one line, why the workers are being ended.
        patience: how long to wait before workers are killed.
        bell: the caller's own, when it listens already.
        screen: shows what workers with a log say; without it they write to their logs unseen.
        verdict: looks, without waiting, for the word that a rank left about who broke the run.
    """
    _require_programs(workers, say)
    by_rank = {worker.rank: worker for worker in workers}
    output = Output({worker.rank: worker.log for worker in workers}, screen)
    with ExitStack() as stack:
        crew = Crew(bell or stack.enter_context(listening()), output)
        stack.callback(output.close)
        stack.callback(crew.end, patience.failing_s)
        for worker in workers:
            if not crew.bell.received:
                crew.start(worker)
        outcome = _Watch(crew, by_rank, patience, say, verdict or _no_word).outcome()
    return _with_last_words(outcome, by_rank)


def _require_programs(workers: Sequence[Worker], say: Callable[[str], None]) -> None:
    for worker in workers:
        if shutil.which(worker.argv[0]) is None:
            raise LaunchError(
                f"cannot start workers: no program {worker.argv[0]!r} on PATH; check its spelling, "
                "or name it by its whole path"
            )
    if not shutil.which("setpriv"):
        say("setpriv (util-linux) is not installed: workers would outlive a killed launcher")


def _no_word() -> None:
    """Stand for a verdict where ranks have no place to leave one."""


@dataclass(frozen=True, slots=True)
class _Watch:
    crew: Crew
    workers: Mapping[int, Worker]
    patience: Patience
    tell: Callable[[str], None]
    verdict: "Callable[[], Verdict | None]"

    def outcome(self) -> Outcome:
        """Wait until the run is over, or has to be, and say how it went."""
        crew, received = self.crew, self.crew.bell.received
        crew.wait(lambda: self._is_disturbed() or STOPPED_EXIT_CODE in crew.codes.values())
        # Whoever saved and stopped did so with all others: they are about to end as well.
        crew.wait(self._is_disturbed, self.patience.saving_s)
        if self._has_failed() and not received:
            crew.wait(self._is_settled, self.patience.blaming_s, every_s=_LOOK_S)
        if received:
            return self._pass_on(received[0])
        if self._has_failed():
            return self._blame()
        if crew.running:
            return self._give_up()
        return without_failure(crew.codes)

    def _has_failed(self) -> bool:
        return any(is_failure(code) for code in self.crew.codes.values())

    def _is_disturbed(self) -> bool:
        """Say whether there is no more reason to wait: all ended, or they have to."""
        return bool(self.crew.bell.received) or self._has_failed() or not self.crew.running

    def _is_settled(self) -> bool:
        crew = self.crew
        return bool(crew.bell.received) or is_settled(crew.codes, crew.running, self.verdict())

    def _pass_on(self, received: int) -> Outcome:
        """Hand a signal to the workers and give them time to save; a second one cuts it short."""
        crew, heard = self.crew, len(self.crew.bell.received)
        # To most programs HUP means that their terminal is gone; a worker never had one.
        passed_on = signal.SIGTERM if received == signal.SIGHUP else received
        self._say(f"received {signal_name(received)}: passing it on")
        crew.ask(passed_on)

        def is_over() -> bool:
            return len(crew.bell.received) > heard or not crew.running

        crew.wait(lambda: is_over() or self._has_failed(), self.patience.saving_s)
        # With one of them gone the others cannot agree on a step to save at.
        crew.wait(is_over, self.patience.failing_s if self._has_failed() else 0)
        second, running = next(iter(crew.bell.received[heard:]), None), crew.running
        crew.kill()
        # Some may have saved and ended between our last look and the kill.
        killed = [rank for rank in running if crew.codes[rank] == -signal.SIGKILL]
        ended = {rank: code for rank, code in crew.codes.items() if rank not in killed}
        return after_signal(received, passed_on, ended, killed, second)

    def _blame(self) -> Outcome:
        codes, verdict = self.crew.codes, self.verdict()
        rank = culprit(codes, verdict)
        assert rank is not None, "nobody has failed"
        outcome = failure(self.workers[rank].title, codes, verdict)
        # What the culprit said is on the screen, and stands in the outcome's reason again.
        self._say(f"{outcome.brief}; ending the others")
        return outcome

    def _give_up(self) -> Outcome:
        """Return the outcome when some have saved and stopped, and others go on regardless."""
        rank = min(self.crew.running)
        reason = (
            f"{self.workers[rank].title} did not end within {self.patience.saving_s:g} s of the "
            "first that saved and stopped"
        )
        self._say(f"{reason}; ending it")
        return Outcome(1, rank, reason, brief=reason)

    def _say(self, line: str) -> None:
        # A terminal that hung up must not keep the workers from saving.
        with suppress(OSError):
            self.tell(line)


def _with_last_words(outcome: Outcome, workers: Mapping[int, Worker]) -> Outcome:
    """Add what the culprit said; read when all have ended, and so complete."""
    if outcome.failed_rank is None:
        return outcome
    log = workers[outcome.failed_rank].log
    if log is None:
        return replace(outcome, reason=f"{outcome.reason}; what it said is above")
    return replace(outcome, reason=with_last_words(outcome, str(log), tail(log)))

"""Start worker processes, watch them, and leave none behind, whoever dies first.

Note "who ends whom". Every worker leads a session of its own. When one fails, or a signal reaches
us, the others are asked to end, and after a grace period their whole process groups are killed.
When we are killed ourselves (kill -9), the kernel kills each worker by its parent-death signal;
what the workers had started is then nobody's, which is why a lab also clears by namespace.
"""

import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from stretto.errors import LaunchError

TAIL_LINES = 20
"""How much of a failed worker's log its error message repeats."""

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The shell asks for its parent only after the parent-death signal is armed, so that a launcher
# that dies between fork and arming is noticed as well.
_IF_PARENT_LIVES = '[ "$PPID" = "$1" ] || exit 143; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class Worker:
    """One process to start; ``env`` is added to our own environment."""

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path | None = None
    """Where its output goes; None lets it write to our own stdout and stderr."""
    place: str = ""
    """Where it runs, for messages, as in ``"host 2"``."""

    @property
    def title(self) -> str:
        """Return how messages name this worker."""
        return f"rank {self.rank} on {self.place}" if self.place else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a set of workers ended; ``exit_code`` is 0 only if every one of them ended with 0."""

    exit_code: int
    failed_rank: int | None = None
    """The first to fail; None when all went well or a signal to us ended the run."""
    reason: str = ""


class Bell:
    """Signals turned into something to wait for; made by `listening`."""

    def __init__(self, wake_fd: int) -> None:
        self._wake_fd = wake_fd
        self.received: list[int] = []
        """Signals that asked us to end, in order of arrival."""

    def wait(self, timeout_s: float | None = None, *, readable: Sequence[int] = ()) -> list[int]:
        """Return at a signal, a child's end or a readable descriptor, with the readable ones."""
        ready, _, _ = select.select([self._wake_fd, *readable], [], [], timeout_s)
        if self._wake_fd in ready:
            os.read(self._wake_fd, 4096)
        return [fd for fd in ready if fd != self._wake_fd]


@contextmanager
def listening() -> Iterator[Bell]:
    """Collect INT, TERM and HUP instead of dying of them, for as long as the context lasts.

    Nothing is raised out of a handler: whoever holds the bell looks at ``received`` when it can
    end in good order. Main thread only, as for every signal handler.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    bell = Bell(read_fd)

    def note(signum: int, _frame: FrameType | None) -> None:
        if signum != signal.SIGCHLD:
            bell.received.append(signum)

    before_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    before = {number: signal.signal(number, note) for number in (*_END_SIGNALS, signal.SIGCHLD)}
    try:
        yield bell
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(read_fd)
        os.close(write_fd)


def run_workers(
    workers: Sequence[Worker],
    *,
    say: Callable[[str], None],
    grace_s: float = 5.0,
    bell: Bell | None = None,
) -> Outcome:
    """Start all workers, wait for all; the first failure, or a signal to us, ends the rest.

    A signal to us is passed on to the workers; a second one cuts the grace period short. Call it
    from the main thread: the parent-death signal follows the thread that started the worker.

    Args:
        workers: what to start; a program that is not found is a `LaunchError` before any starts.
        say: told at once, in one line, why the workers are being ended.
        grace_s: between the request to end and the kill.
        bell: the caller's own, when it listens already.
    """
    for worker in workers:
        _require_program(worker.argv[0])
    if not shutil.which("setpriv"):
        say("setpriv (util-linux) is not installed: workers would outlive a killed launcher")
    crew: list[_Child] = []
    with ExitStack() as stack:
        bell = bell or stack.enter_context(listening())
        stack.callback(_end, crew, bell, grace_s)
        for worker in workers:
            if not bell.received:
                crew.append(_start(worker))
        return _watch(crew, bell, say)


def culprit(ended: Mapping[int, int]) -> int | None:
    """Return the rank to blame among those seen to have ended together, None if all went well.

    A code below zero is the signal that killed a rank. Such a rank is the cause: others fail by
    themselves when it no longer answers.
    """
    failed = [(code > 0, rank) for rank, code in ended.items() if code]
    return min(failed)[1] if failed else None


def guarded(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` changed so that the process is killed when this one dies."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return list(argv)
    arming = [setpriv, "--pdeathsig", "KILL", "--"]
    return [*arming, "/bin/sh", "-c", _IF_PARENT_LIVES, "sh", str(os.getpid()), *argv]


def tail(log: Path, *, num_lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log, read from its end so that its size does not matter."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * num_lines))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-num_lines:])


@dataclass(frozen=True, slots=True)
class _Child:
    worker: Worker
    process: subprocess.Popen[bytes]

    def exit_code(self) -> int | None:
        """Return how it ended (minus the signal that killed it) without reaping it.

        An unreaped leader keeps its process group's number from being given to a stranger.
        """
        if self.process.returncode is not None:
            return self.process.returncode
        seen = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def _require_program(program: str) -> None:
    if shutil.which(program) is None:
        raise LaunchError(
            f"cannot start workers: no program {program!r} on PATH; check its spelling, or name it "
            "by its whole path"
        )


def _start(worker: Worker) -> _Child:
    with ExitStack() as stack:
        output = stack.enter_context(worker.log.open("wb")) if worker.log else None
        process = subprocess.Popen(
            guarded(worker.argv),
            env={**os.environ, **worker.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
        )
    return _Child(worker, process)


def _watch(crew: Sequence[_Child], bell: Bell, say: Callable[[str], None]) -> Outcome:
    workers = {child.worker.rank: child.worker for child in crew}
    while not bell.received:
        codes = {child.worker.rank: child.exit_code() for child in crew}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        rank = culprit(ended)
        if rank is not None:
            worker, code = workers[rank], ended[rank]
            say(f"{worker.title} ended with {_describe(code)}: ending the others")
            return _failure(worker, code)
        if len(ended) == len(crew):
            return Outcome(0)
        bell.wait()
    name = _signal_name(bell.received[0])
    say(f"received {name}: passing it on")
    return Outcome(128 + bell.received[0], reason=f"ended by {name}")


def _failure(worker: Worker, code: int) -> Outcome:
    reason = f"{worker.title} ended with {_describe(code)}"
    if worker.log is None:
        reason += "; what it said is above"
    else:
        reason += f"; the end of {worker.log}:\n{tail(worker.log)}"
    return Outcome(code if code > 0 else 128 - code, worker.rank, reason)


def _describe(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    # Real-time signals have numbers only.
    return {known.value: known.name for known in signal.Signals}.get(number, str(number))


def _end(crew: Sequence[_Child], bell: Bell, grace_s: float) -> None:
    """Ask the workers that still run to end, kill all groups, and reap."""
    request = bell.received[0] if bell.received else signal.SIGTERM
    heard = len(bell.received)
    deadline_s = time.monotonic() + grace_s
    for child in crew:
        # The worker alone: one that ends in good order still needs its own helpers meanwhile.
        if child.exit_code() is None:
            os.kill(child.process.pid, request)
    while any(child.exit_code() is None for child in crew):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or len(bell.received) > heard:
            break
        bell.wait(left_s)
    for child in crew:
        # A group without members left is not an error.
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()

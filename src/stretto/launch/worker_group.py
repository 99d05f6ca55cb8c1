"""Start worker processes, read their output, and end all of them with the launcher.

Every worker leads a session of its own. When one fails, or a signal reaches the launcher, the
others get a signal, and after a grace period their whole process groups are killed. When the
launcher itself is killed (kill -9), the kernel kills each worker by its parent-death signal.
Processes that the workers had started may then survive, which is why a lab also clears by
namespace.
"""

import math
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from stretto.launch.worker_output import WorkerOutput
from stretto.telemetry.event_text import strip_unprintable

TAIL_LINES = 20
"""Lines of a failed worker's log that its error message repeats."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to stop: sent by a person, a scheduler, or a terminal that is closed."""

# The shell asks for its parent only after the parent-death signal is armed, so that a launcher
# that dies between fork and arming is noticed as well.
_IF_PARENT_LIVES = '[ "$PPID" = "$1" ] || exit 143; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One process to start; ``env`` is added to our own environment."""

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path | None = None
    """File for its output; None lets it write to our own stdout and stderr."""
    location: str = ""
    """Its host, for messages, as in ``"host 2"``."""

    @property
    def title(self) -> str:
        """The name of this worker in messages."""
        return f"rank {self.rank} on {self.location}" if self.location else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """How a set of workers ended; ``exit_code`` is 0 only if all of them ended with 0."""

    exit_code: int
    failed_rank: int | None = None
    """The rank that caused the failure; None if none failed or the run was asked to stop."""
    reason: str = ""
    short_reason: str = ""
    """A failure's reason in a few words, for places that show the full reason as well."""


class SignalWaiter:
    """Waits for signals, child exits and readable descriptors; made by `catch_signals`."""

    def __init__(self, wake_fd: int) -> None:
        self._wake_fd = wake_fd
        self.received: list[int] = []
        """Stop signals, in order of arrival."""

    def wait(self, timeout_s: float | None = None, *, readable: Sequence[int] = ()) -> list[int]:
        """Wait for a signal, a child's end or a readable descriptor; return the readable ones."""
        # Not select(): it supports descriptors up to 1023 only, and a large machine has many ranks.
        poll = select.poll()
        for fd in (self._wake_fd, *readable):
            poll.register(fd, select.POLLIN)
        ready = [
            fd for fd, _ in poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1e3))
        ]
        if self._wake_fd in ready:
            os.read(self._wake_fd, 4096)
        return [fd for fd in ready if fd != self._wake_fd]


@contextmanager
def catch_signals() -> Iterator[SignalWaiter]:
    """Collect `STOP_SIGNALS` instead of being killed by them, while the context lasts.

    Nothing is raised in a handler: the user of the `SignalWaiter` checks ``received`` where it can
    end in good order. Main thread only, like every signal handler.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signals = SignalWaiter(read_fd)

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        if signum != signal.SIGCHLD:
            signals.received.append(signum)

    before_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    before = {
        number: signal.signal(number, on_signal) for number in (*STOP_SIGNALS, signal.SIGCHLD)
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(read_fd)
        os.close(write_fd)


class WorkerGroup:
    """The started workers: their exit codes, their output, and how to end them.

    Waiting methods keep reading the workers' output, so that none of them blocks on a full pipe.
    """

    def __init__(self, signals: SignalWaiter, output: WorkerOutput) -> None:
        self.signals = signals
        self.exit_codes: dict[int, int] = {}
        """By rank, for ended workers: the exit code, or minus the signal that killed it."""
        self._output = output
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def running(self) -> list[int]:
        """The ranks that have not been seen to end."""
        return [rank for rank in self._processes if rank not in self.exit_codes]

    def start(self, worker: WorkerSpec) -> None:
        """Start a worker; the kernel kills it when this process dies."""
        with self._output.redirect_streams(worker.rank) as (stdout, stderr):
            self._processes[worker.rank] = subprocess.Popen(
                with_parent_death_signal(worker.argv),
                env={**os.environ, **worker.env},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def wait(
        self, done: Callable[[], object], within_s: float = math.inf, *, every_s: float = math.inf
    ) -> None:
        """Wait until ``done()`` is true or ``within_s`` have passed.

        ``done`` is checked after each event and every ``every_s`` seconds.
        """
        deadline_s = time.monotonic() + within_s
        self._collect_exits()
        while not done() and (left_s := deadline_s - time.monotonic()) > 0:
            timeout_s = min(left_s, every_s, self._output.max_wait_s())
            ready = self.signals.wait(
                None if timeout_s == math.inf else timeout_s, readable=self._output.descriptors
            )
            self._output.read(ready)
            self._collect_exits()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the running workers, but not to their child processes."""
        for rank in self.running:
            os.kill(self._processes[rank].pid, signum)

    def kill(self) -> None:
        """Kill the process groups of all workers, also of those that ended, and reap them.

        A worker that had already ended keeps its exit code.
        """
        for rank, process in self._processes.items():
            # An empty process group is not an error.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self.exit_codes.setdefault(rank, process.wait())
        self._processes.clear()

    def terminate(self, grace_s: float) -> None:
        """Send TERM to the running workers, then KILL; a signal to us ends the grace period."""
        num_seen = len(self.signals.received)
        self.send_signal(signal.SIGTERM)
        self.wait(lambda: not self.running or len(self.signals.received) > num_seen, grace_s)
        self.kill()

    def _collect_exits(self) -> None:
        """Record exit codes of ended workers, after reading the rest of their output.

        They are not reaped: while a group leader is not reaped, its process group id is not reused.
        """
        for rank in self.running:
            pid = self._processes[rank].pid
            exit_info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if exit_info is not None:
                self._output.drain(rank)
                exited = exit_info.si_code == os.CLD_EXITED
                self.exit_codes[rank] = exit_info.si_status if exited else -exit_info.si_status


def with_parent_death_signal(argv: Sequence[str], *, death_signal: str = "KILL") -> list[str]:
    """Return ``argv`` wrapped so that the process gets ``death_signal`` when this one dies.

    A signal other than KILL lets the process clean up.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return list(argv)
    setpriv_command = [setpriv, "--pdeathsig", death_signal, "--"]
    return [*setpriv_command, "/bin/sh", "-c", _IF_PARENT_LIVES, "sh", str(os.getpid()), *argv]


def read_tail(log: Path, *, num_lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log; only its end is read, so its size does not matter."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * num_lines))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(strip_unprintable(line) for line in lines[-num_lines:])

"""Start worker processes, hear them, and leave none behind, whoever dies first.

Note "who ends whom". Every worker leads a session of its own. When one fails, or a signal reaches
us, the others are asked to end, and after some patience their whole process groups are killed.
When we are killed ourselves (kill -9), the kernel kills each worker by its parent-death signal;
what the workers had started is then nobody's, which is why a lab also clears by namespace.
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

from stretto.launch.pipes import Output
from stretto.telemetry.wording import printable

TAIL_LINES = 20
"""How much of a failed worker's log its error message repeats."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What asks a run to stop: a person, a scheduler, a terminal that is closed."""

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
    """The first to fail; None when all went well or the run was asked to stop."""
    reason: str = ""
    brief: str = ""
    """A failure's reason in a few words, for where the whole of it is told beside."""


class Bell:
    """Signals turned into something to wait for; made by `listening`."""

    def __init__(self, wake_fd: int) -> None:
        self._wake_fd = wake_fd
        self.received: list[int] = []
        """Signals that asked us to stop, in order of arrival."""

    def wait(self, timeout_s: float | None = None, *, readable: Sequence[int] = ()) -> list[int]:
        """Return at a signal, a child's end or a readable descriptor, with the readable ones."""
        # Not select(): it knows no descriptor above 1023, and a large machine has many ranks.
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
def listening() -> Iterator[Bell]:
    """Collect `STOP_SIGNALS` instead of dying of them, for as long as the context lasts.

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
    before = {number: signal.signal(number, note) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
    try:
        yield bell
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(read_fd)
        os.close(write_fd)


class Crew:
    """The workers that were started: how they end, what they say, and their end if need be.

    Whoever waits here keeps reading what they say, so that none of them is stuck on a full pipe.
    """

    def __init__(self, bell: Bell, output: Output) -> None:
        self.bell = bell
        self.codes: dict[int, int] = {}
        """How those ended that did: the exit code, or minus the signal that killed them."""
        self._output = output
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def running(self) -> list[int]:
        """Return the ranks that were not seen to end."""
        return [rank for rank in self._processes if rank not in self.codes]

    def start(self, worker: Worker) -> None:
        """Start a worker; it is killed when this process dies."""
        with self._output.connected(worker.rank) as (stdout, stderr):
            self._processes[worker.rank] = subprocess.Popen(
                guarded(worker.argv),
                env={**os.environ, **worker.env},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def wait(
        self, done: Callable[[], object], within_s: float = math.inf, *, every_s: float = math.inf
    ) -> None:
        """Return when ``done`` says so, or late; asked at each event, and every ``every_s``."""
        deadline_s = time.monotonic() + within_s
        self._look()
        while not done() and (left_s := deadline_s - time.monotonic()) > 0:
            timeout_s = min(left_s, every_s, self._output.wait_s())
            ready = self.bell.wait(
                None if timeout_s == math.inf else timeout_s, readable=self._output.descriptors
            )
            self._output.read(ready)
            self._look()

    def ask(self, signum: int) -> None:
        """Send a signal to the workers that still run; not to helpers, which they still need."""
        for rank in self.running:
            os.kill(self._processes[rank].pid, signum)

    def kill(self) -> None:
        """Kill the process groups of all workers, also of those that ended, and reap.

        Who had ended by then, unseen, keeps the code it ended with.
        """
        for rank, process in self._processes.items():
            # A group without members left is not an error.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self.codes.setdefault(rank, process.wait())
        self._processes.clear()

    def end(self, grace_s: float) -> None:
        """Ask the workers that still run to end, then kill; a signal to us cuts the grace short."""
        heard = len(self.bell.received)
        self.ask(signal.SIGTERM)
        self.wait(lambda: not self.running or len(self.bell.received) > heard, grace_s)
        self.kill()

    def _look(self) -> None:
        """See who has ended, and hear them out: their last words come before their end is judged.

        They are not reaped: an unreaped leader keeps its process group's number from being given
        to a stranger.
        """
        for rank in self.running:
            pid = self._processes[rank].pid
            seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if seen is not None:
                self._output.hear_out(rank)
                exited = seen.si_code == os.CLD_EXITED
                self.codes[rank] = seen.si_status if exited else -seen.si_status


def guarded(argv: Sequence[str], *, by: str = "KILL") -> list[str]:
    """Return ``argv`` changed so that the process is killed, or asked to end, when this one dies.

    ``by`` is the signal; one that a process can hear lets it clear up.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return list(argv)
    arming = [setpriv, "--pdeathsig", by, "--"]
    return [*arming, "/bin/sh", "-c", _IF_PARENT_LIVES, "sh", str(os.getpid()), *argv]


def tail(log: Path, *, num_lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log, read from its end so that its size does not matter."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * num_lines))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(printable(line) for line in lines[-num_lines:])

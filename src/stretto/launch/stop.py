"""How a rank is told to stop: TERM, INT, USR1 and USR2, kept until the step's end asks for them.

Slurm sends TERM when it preempts, and the signal of ``--signal`` before a time limit; torchrun
passes TERM on, mpirun USR1 and USR2, a person presses Ctrl-C.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stretto.errors import STOPPED_EXIT_CODE, StrettoError
from stretto.launch.early import let_signals_through
from stretto.train.agreement import STOP_WORDS


class StoppedError(StrettoError):
    """A request to stop came before there was a step to finish."""

    exit_code = STOPPED_EXIT_CODE


class StopRequest:
    """The first request that reached this process; made by `heeding`."""

    def __init__(self) -> None:
        self._word: str | None = None
        self._deferred = False
        self.closed = False

    def word(self) -> str | None:
        """Return the signal that asked, as ``TERM``; None when none came."""
        return self._word

    def defer(self) -> None:
        """From now on a request waits to be asked for; before, it ends the process at once."""
        self._deferred = True

    def close(self) -> None:
        """Hear nothing more, to the end of the process.

        All is saved, and a launcher that sees the first rank leave may signal the others.
        """
        for number in _numbers():
            signal.signal(number, signal.SIG_IGN)
        self.closed = True

    def note(self, signum: int, _frame: FrameType | None) -> None:
        """Take a signal."""
        self._word = self._word or signal.Signals(signum).name.removeprefix("SIG")
        if not self._deferred:
            raise StoppedError(f"stopped by {self._word} before the first step; nothing is lost")


@contextmanager
def heeding() -> Iterator[StopRequest]:
    """Turn the stop signals into a `StopRequest` for as long as the context lasts."""
    request = StopRequest()
    before = {number: signal.signal(number, request.note) for number in _numbers()}
    try:
        let_signals_through()
        yield request
    finally:
        if not request.closed:
            for number, handler in before.items():
                signal.signal(number, handler)


def _numbers() -> list[signal.Signals]:
    return [signal.Signals[f"SIG{word}"] for word in STOP_WORDS]

"""What a rank does before torch is imported, which takes seconds; nothing heavy is needed here."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

HELD_BACK = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that would kill a process without handlers; Ctrl-C is answered by Python itself."""


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Keep stop signals waiting until `let_signals_through`: none is lost, none kills.

    A scheduler may warn or preempt a job in its first seconds. A rank killed by the signal would
    be a failure; one that hears it once it can ends with the code of a stop.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_signals_through() -> None:
    """Deliver what was held back, now that somebody listens."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)


def quiet_torch() -> None:
    """Keep torch's own words on a lost store, a stack of frames from every rank, off the screen."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

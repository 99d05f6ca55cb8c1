"""Setup of a rank's process before torch is imported: signals, log level, parent watch.

Importing torch takes seconds, so nothing heavy is imported here.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that would kill a process without handlers; Python itself handles Ctrl-C."""


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block stop signals until `unblock_stop_signals`, so that none is lost or kills the process.

    A scheduler may warn or preempt a job in its first seconds. A rank killed by the signal would
    count as failed. A rank that handles it later ends with the exit code of a stop.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stop_signals() -> None:
    """Deliver blocked signals; call it once handlers are installed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)


def quiet_torch() -> None:
    """Silence torch's C++ warnings: a lost store would print a stack trace from every rank."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


PARENT_POLL_INTERVAL_S = 0.5
LAUNCHER_NAME = "stretto train --workers"
"""The name under which our own launcher runs."""
PARENT_PID_VARIABLE = "STRETTO_PARENT"
"""Set by our launcher, in case it dies before the rank reads its parent's process id."""


def exit_with_parent() -> None:
    """Start a thread that ends the process, without a message, when its parent is gone.

    This works under any launcher. Our own launcher also arms the kernel's parent-death signal where
    it can. Other launchers do not, and a rank cannot arm it for them, because the signal follows
    the thread that started the rank and not the process.
    """
    parent = int(os.environ.get(PARENT_PID_VARIABLE, os.getppid()))
    threading.Thread(
        target=_poll_parent, args=(parent,), name="stretto-parent", daemon=True
    ).start()


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_INTERVAL_S)
    os._exit(1)

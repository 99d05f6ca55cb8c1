"""One thread that starts messages in the order they are given, while backward goes on.

Note: one order on every rank. Messages are started strictly in the order of submission, never by
local circumstance; ranks that submit in one order can therefore neither cross nor wait in a
circle. The back end's own collectives return at once, so several are in flight; a schedule made of
single messages is finished before the next job starts.
"""

import queue
import threading
from collections.abc import Callable

from stretto.comm.channel import Pending
from stretto.errors import StrettoError


class Ticket:
    """The receipt for one submitted job; whoever waits on it gets the job's failure."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._pending: Pending | None = None
        self._failure: BaseException | None = None

    def wait(self) -> Pending:
        """Return when the job's message is done."""
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        assert self._pending is not None
        self._pending.wait()
        return self._pending

    def _run(self, job: Callable[[], Pending]) -> None:
        try:
            self._pending = job()
        except BaseException as failure:  # noqa: BLE001 - raised where the ticket is waited for
            self._failure = failure
        self._started.set()


class Doorstep:
    """The courier's stand-in where starting a message takes no time: jobs run where they arise.

    Only for messages that the back end carries on by itself; a thread would add its own wake-up,
    which on a busy machine is milliseconds, to every bucket.
    """

    def submit(self, job: Callable[[], Pending]) -> Ticket:
        """Run ``job`` at once."""
        ticket = Ticket()
        ticket._run(job)
        return ticket

    def close(self) -> None:
        """Nothing to end."""


class Courier:
    """Owner of the communication thread; `close` ends it once everything submitted has started."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Ticket, Callable[[], Pending]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name="courier", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Pending]) -> Ticket:
        """Queue ``job``, which starts one message; it runs on the courier's thread."""
        if not self._thread.is_alive():
            raise StrettoError("a message was given to a courier that had been closed")
        ticket = Ticket()
        self._jobs.put((ticket, job))
        return ticket

    def close(self) -> None:
        """End the thread after what is queued; safe to call twice."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            ticket, job = item
            ticket._run(job)

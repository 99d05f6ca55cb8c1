"""Runs point-to-point exchanges in the background: one thread for each lane, in submission order.

It is `stretto.comm.collective_executor` without arithmetic: received tensors are not added up.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from stretto.comm.transport import CompletedWork, P2POp, Transport, Work
from stretto.errors import StrettoError


class P2PExecutor:
    """Owns the lane threads. All ranks start the exchanges of a lane in the same order."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lanes: dict[int, _LaneThread] = {}
        self._closed = False

    def start(
        self,
        sends: Sequence[P2POp],
        receives: Sequence[P2POp],
        lane: int,
        on_complete: Callable[[], None] | None = None,
    ) -> Work:
        """Start an exchange and return; its tensors must not be touched until `Work.wait` returns.

        ``on_complete`` is called once everything has arrived, before the lane's next exchange. CPU
        tensors: on the lane's thread. GPU tensors: on the caller's, once the exchange is queued.
        """
        if self._closed:
            raise StrettoError("cannot start an exchange: the executor has been closed")
        if not sends and not receives and on_complete is None:
            return CompletedWork(time.monotonic())
        exchange = _RunningExchange(sends, receives, on_complete)
        if any(p2p_op.tensor.is_cuda for p2p_op in (*sends, *receives)):
            exchange.run(self._transport)  # this only queues it: the stream keeps the order
            return exchange
        if lane not in self._lanes:
            self._lanes[lane] = _LaneThread(self._transport, lane)
        return self._lanes[lane].submit(exchange)

    def close(self) -> None:
        """End the threads once the queued exchanges have run; may be called again."""
        self._closed = True
        for lane in self._lanes.values():
            lane.close()


class _RunningExchange:
    """The `Work` of one exchange."""

    def __init__(
        self,
        sends: Sequence[P2POp],
        receives: Sequence[P2POp],
        on_complete: Callable[[], None] | None,
    ) -> None:
        self.finished_s: float | None = None
        self._sends, self._receives, self._on_complete = sends, receives, on_complete
        self._completed = threading.Event()
        self._failure: BaseException | None = None

    def wait(self) -> None:
        """Return when every message has left or arrived; raise the failure, if there was one."""
        self._completed.wait()
        if self._failure is not None:
            raise self._failure

    def run(self, transport: Transport) -> BaseException | None:
        """Run the exchange and the callback; return the failure, if there was one."""
        try:
            transport.exchange(self._sends, self._receives)
            if self._on_complete is not None:
                self._on_complete()
        except BaseException as failure:  # noqa: BLE001 - raised again by `wait`
            self.fail(failure)
            return failure
        self.finished_s = time.monotonic()
        self._completed.set()
        return None

    def fail(self, failure: BaseException) -> None:
        """Record the failure and end every wait."""
        self._failure = failure
        self._completed.set()


class _LaneThread:
    """One thread that runs the exchanges of one lane."""

    def __init__(self, transport: Transport, number: int) -> None:
        self._transport = transport
        self._queue: queue.SimpleQueue[_RunningExchange | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run_loop, name=f"p2p-lane-{number}", daemon=True
        )
        self._thread.start()

    def submit(self, exchange: _RunningExchange) -> _RunningExchange:
        self._queue.put(exchange)
        return exchange

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run_loop(self) -> None:
        earlier_failure: BaseException | None = None
        while (exchange := self._queue.get()) is not None:
            if earlier_failure is not None:
                exchange.fail(earlier_failure)  # our messages no longer match the peers'
            else:
                earlier_failure = exchange.run(self._transport)

"""Carries parcels to peers in the background: a thread for each lane, each in the order given.

Like the courier's errands, but nobody adds anything up: what arrives lies where it was wanted.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from stretto.comm.channel import Channel, Finished, Parcel, Pending
from stretto.errors import StrettoError


class Post:
    """Owner of the lanes' threads; all ranks start the same exchanges on a lane in one order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lanes: dict[int, _Lane] = {}
        self._closed = False

    def start(
        self,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        lane: int,
        then: Callable[[], None] | None = None,
    ) -> Pending:
        """Begin an exchange and return; the tensors are the post's until it is waited for.

        ``then`` is called when everything has arrived, before the lane's next exchange.
        """
        if self._closed:
            raise StrettoError("parcels were given to a post that had been closed")
        if not sends and not receives and then is None:
            return Finished(time.monotonic())
        exchange = _Exchange(sends, receives, then)
        if any(parcel.tensor.is_cuda for parcel in (*sends, *receives)):
            exchange.run(self._channel)  # only queued: the stream keeps the order
            return exchange
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(self._channel, lane)
        return self._lanes[lane].submit(exchange)

    def close(self) -> None:
        """End the threads after what is queued; safe to call twice."""
        self._closed = True
        for lane in self._lanes.values():
            lane.close()


class _Exchange:
    """One that is under way."""

    def __init__(
        self,
        sends: Sequence[Parcel],
        receives: Sequence[Parcel],
        then: Callable[[], None] | None,
    ) -> None:
        self.finished_s: float | None = None
        self._sends, self._receives, self._then = sends, receives, then
        self._over = threading.Event()
        self._failure: BaseException | None = None

    def wait(self) -> None:
        """Return when everything has left and arrived; raise what went wrong."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def run(self, channel: Channel) -> BaseException | None:
        """Carry it out; return what went wrong."""
        try:
            channel.exchange(self._sends, self._receives)
            if self._then is not None:
                self._then()
        except BaseException as failure:  # noqa: BLE001 - raised where it is waited for
            self.fail(failure)
            return failure
        self.finished_s = time.monotonic()
        self._over.set()
        return None

    def fail(self, failure: BaseException) -> None:
        """End it."""
        self._failure = failure
        self._over.set()


class _Lane:
    """One thread that carries the exchanges of one lane."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._waiting: queue.SimpleQueue[_Exchange | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"post-{number}", daemon=True)
        self._thread.start()

    def submit(self, exchange: _Exchange) -> _Exchange:
        self._waiting.put(exchange)
        return exchange

    def close(self) -> None:
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        broken: BaseException | None = None
        while (exchange := self._waiting.get()) is not None:
            if broken is not None:
                exchange.fail(broken)  # the peers' messages no longer match ours
            else:
                broken = exchange.run(self._channel)

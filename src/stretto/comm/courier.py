"""Runs errands in the order they are given: a thread for each lane, on a GPU a stream.

Note: one order on every rank. Each lane takes its legs strictly in the order in which errands were
submitted, never by local circumstance. No leg of an errand ever waits for a later errand, so ranks
that submit in one order can neither cross nor wait in a circle; yet while one errand is in its last
phase on one lane, the next may be in its first on another.
"""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Self

from torch import Tensor

from stretto.comm.channel import Channel, Finished, Pending
from stretto.comm.codecs.codec import Codec
from stretto.comm.errand import Errand, Leg, Scratch, lay_out
from stretto.comm.schedule import Schedule
from stretto.comm.small import gather_text
from stretto.comm.streams import Streams
from stretto.errors import ChannelError, ScheduleError, StrettoError


class Flight:
    """An errand under way; `wait` returns when its last leg is done."""

    def __init__(self, errand: Errand) -> None:
        self.errand = errand
        self.finished_s: float | None = None
        self._left = len(errand.legs)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._failure: BaseException | None = None
        awaited = {index for leg in errand.legs for index in leg.waits}
        self._done = {index: threading.Event() for index in awaited}

    def wait(self) -> None:
        """Return when it is done; raise what went wrong on any of its lanes."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def run(self, leg: Leg, channel: Channel) -> None:
        """Run one leg, on its lane's thread, once the legs it needs are done."""
        for needed in leg.waits:
            self._done[needed].wait()
        if self._failure is not None:
            return
        try:
            leg.run(channel)
        except BaseException as failure:  # noqa: BLE001 - raised where the flight is waited for
            self.fail(failure)
            return
        if leg.index in self._done:
            self._done[leg.index].set()
        with self._lock:
            self._left -= 1
            if not self._left:
                self.finished_s = time.monotonic()
                self._over.set()

    def fail(self, failure: BaseException) -> None:
        """End it: whoever waits, here or on another lane, goes on."""
        self._failure = self._failure or failure
        for done in self._done.values():
            done.set()
        self._over.set()

    @property
    def failure(self) -> BaseException | None:
        """Return what ended it, if something did."""
        return self._failure


class Courier:
    """Owner of the lanes' threads; `close` ends them once everything submitted has been run.

    A ``frugal`` one gives room for what arrives back whenever nothing does; others, once everything
    has been laid out, allocate nothing.
    """

    def __init__(self, channel: Channel, *, frugal: bool = False) -> None:
        self._channel = channel
        self._scratch = Scratch(lent=frugal)
        self._agreed: set[str] = set()
        self._lanes: dict[int, _Lane] = {}
        self._streams: Streams | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def prepare(self, schedule: Schedule, tensor: Tensor, codec: Codec | None = None) -> Errand:
        """Lay ``schedule`` on ``tensor``, once for all the times it will be run.

        What travels is what ``codec`` makes of it, if there is one.
        """
        if self._channel.size != schedule.size:
            raise ScheduleError(
                f"{schedule.name} was made for {schedule.size} ranks, the channel has "
                f"{self._channel.size}"
            )
        with self._scratch.laying_out():
            return lay_out(schedule, tensor, self._channel.rank, self._scratch, codec)

    def prepare_all(self, schedules: Sequence[Schedule], tensors: Sequence[Tensor]) -> list[Errand]:
        """Lay each schedule on its tensor, and make sure that all ranks mean the same."""
        pairs = list(enumerate(zip(schedules, tensors, strict=True)))
        errands: dict[int, Errand] = {}
        # The largest first: it decides how much scratch the lanes need.
        for index, (schedule, tensor) in sorted(pairs, key=lambda pair: -pair[1][1].nbytes):
            errands[index] = self.prepare(schedule, tensor)
        ordered = [errands[index] for index, _ in pairs]
        self.agree(*ordered)
        return ordered

    def agree(self, *errands: Errand) -> None:
        """Make sure that all ranks mean the same; all call this together, before the first start.

        A back end that is handed tensors of different sizes ends the process, or worse.
        """
        if self._channel.size == 1 or all(e.layout in self._agreed for e in errands):
            return
        new = {e.layout: e for e in errands if e.layout not in self._agreed}
        lanes = max(lane + 1 for errand in new.values() for lane in (*errand.lanes, 0))
        told = gather_text("\n".join([str(lanes), *new]), self._channel)
        _compare([text.partition("\n")[2] for text in told])
        self._channel.reserve(max(int(text.partition("\n")[0]) for text in told))
        self._agreed.update(new)

    def start(self, errand: Errand) -> Pending:
        """Begin ``errand`` and return; the tensor is the courier's until it is waited for."""
        if self._closed:
            raise StrettoError("an errand was given to a courier that had been closed")
        self.agree(errand)
        if errand.schedule.native:
            return self._channel.start_all_reduce(errand.flat)
        if not errand.legs:
            return Finished(time.monotonic())
        if errand.flat.is_cuda:
            self._streams = self._streams or Streams(self._channel)
            return self._streams.start(errand)
        flight = Flight(errand)
        for lane in errand.lanes:
            if lane not in self._lanes:
                self._lanes[lane] = _Lane(lane, self._channel, self._scratch)
            self._lanes[lane].submit(flight)
        return flight

    def run(self, errand: Errand) -> None:
        """Carry ``errand`` out; where nothing else is under way, without waking a thread."""
        busy = any(lane.busy for lane in self._lanes.values())
        elsewhere = errand.flat.is_cuda or errand.schedule.native or len(errand.lanes) != 1
        if busy or self._closed or elsewhere:
            self.start(errand).wait()
            return
        self.agree(errand)
        (lane,) = errand.lanes
        self._scratch.open(lane)
        try:
            for leg in errand.legs:
                leg.run(self._channel)
        finally:
            self._scratch.close(lane)

    def close(self) -> None:
        """End the threads after what is queued; safe to call twice."""
        self._closed = True
        for lane in self._lanes.values():
            lane.close()


class _Lane:
    """One thread that runs the legs of one lane."""

    def __init__(self, number: int, channel: Channel, scratch: Scratch) -> None:
        self._number = number
        self._channel = channel
        self._scratch = scratch
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._submitted = self._finished = 0
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"courier-{number}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether something submitted is not done yet."""
        return self._submitted != self._finished

    def submit(self, flight: Flight) -> None:
        self._submitted += 1
        self._flights.put(flight)

    def close(self) -> None:
        if self._thread.is_alive():
            self._flights.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (flight := self._flights.get()) is not None:
            if self._broken is not None:
                flight.fail(self._broken)  # the peers' messages no longer match ours
            if flight.errand.needs_room:
                self._scratch.open(self._number)
            else:
                self._scratch.close(self._number)
            for leg in flight.errand.legs:
                if leg.lane == self._number:
                    flight.run(leg, self._channel)
            self._broken = self._broken or flight.failure
            if self._flights.empty():
                self._scratch.close(self._number)
            self._finished += 1


def _compare(layouts: list[str]) -> None:
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            pairs = zip(layouts[0].splitlines(), layout.splitlines(), strict=False)
            first, other = next((p for p in pairs if p[0] != p[1]), (layouts[0], layout))
            raise ChannelError(
                f"ranks do not mean the same message: rank 0 begins {first}, rank {rank} {other}; "
                "every rank must call the same collectives with tensors of one size and type"
            )

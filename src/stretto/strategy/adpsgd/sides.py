"""The two sides of asynchronous gossip: active ranks visit passive ones, which answer at any time.

::

    active                                        passive
    visit    a word                ------------>  hears it
             the model             <----------->  the model, both at once
             goes half way                        goes half way
             hears it              <------------  "so have I": the visit is over for both
    rest     "no more for now"     ------------>  has heard it from all who are active: nothing is
                                                  under way

Which of a pair speaks first never changes, so one lane does for all of it.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from stretto.comm.channel import Channel, Parcel
from stretto.strategy.adpsgd.live import Live
from stretto.topology.random_events import Act, active_ranks, is_active, passive_ranks

LANE = 1
"""Apart from what all ranks do together, on lane 0."""
_VISIT, _NO_MORE, _SO_HAVE_I = 1.0, 0.0, 2.0

Whom = Callable[[int], int | None]
"""From a step to the peer that an active rank visits after it; None: there is nobody."""
Turn = Callable[[Act], AbstractContextManager[object]]
"""Lets an act wait for its turn, where somebody has set an order."""


class Side(Protocol):
    """What a rank does about its peers, beside its steps."""

    def open(self) -> None:
        """From now on averages are made; the live model is there."""
        ...

    def visit(self, step: int) -> None:
        """Begin the visit that follows ``step``, once that before has ended; raise what failed."""
        ...

    def rest(self) -> None:
        """Return when nothing is under way and nothing will be until `open`; all together."""
        ...

    def close(self) -> None:
        """End threads; waits for no peer."""
        ...


def side_of(channel: Channel, live: Live, whom: Whom, turn: Turn) -> Side:
    """Return the side on which a rank is."""
    if is_active(channel.rank):
        return Active(channel, live, whom, turn)
    return Passive(channel, live)


class Active:
    """Visits peers, one after another, on a thread of its own."""

    def __init__(self, channel: Channel, live: Live, whom: Whom, turn: Turn) -> None:
        self._channel, self._live, self._whom, self._turn = channel, live, whom, turn
        self._said, self._heard = live.rooms(), live.rooms()
        self._under_way = _done()
        self._worker = _Worker("visits")

    def open(self) -> None:
        """Do nothing: it is this side that begins."""

    def visit(self, step: int) -> None:
        """Let the thread begin a visit, if there is somebody."""
        self._under_way.result()
        peer = self._whom(step)
        if peer is not None:
            self._under_way = self._worker.do(partial(self._visit, peer))

    def rest(self) -> None:
        """End the visit that is under way, and tell all who are passive that there is no more."""
        self._under_way.result()
        word = torch.tensor([_NO_MORE])
        passive = passive_ranks(self._channel.size)
        self._channel.exchange([Parcel(peer, word, LANE) for peer in passive], [])

    def close(self) -> None:
        """End the thread."""
        self._worker.close(wait=self._under_way.done())

    def _visit(self, peer: int) -> None:
        with self._turn(Act.AVERAGE):
            self._live.say(self._said)
            sends = [torch.tensor([_VISIT]), *self._said]
            self._channel.exchange(_parcels(peer, sends), _parcels(peer, self._heard))
            self._live.meet(self._said, self._heard)
            self._channel.exchange([], [Parcel(peer, torch.empty(1), LANE)])


class Passive:
    """Answers whoever comes; a thread hears each of those who may."""

    def __init__(self, channel: Channel, live: Live) -> None:
        self._channel, self._live = channel, live
        self._said, self._heard = live.rooms(), live.rooms()
        self._answering = threading.Lock()
        active = active_ranks(channel.size)
        self._listeners = {peer: _Worker(f"hears-{peer}") for peer in active}
        self._no_more = {peer: _done() for peer in active}

    def open(self) -> None:
        """Begin to listen."""
        for peer, listener in self._listeners.items():
            self._no_more[peer] = listener.do(partial(self._listen, peer))

    def visit(self, step: int) -> None:
        """Visit nobody; raise what went wrong with those who came."""
        for listening in self._no_more.values():
            if listening.done():
                listening.result()

    def rest(self) -> None:
        """Answer until all who are active have said that there is no more."""
        for listening in self._no_more.values():
            listening.result()

    def close(self) -> None:
        """End the threads."""
        for peer, listener in self._listeners.items():
            listener.close(wait=self._no_more[peer].done())

    def _listen(self, peer: int) -> None:
        word = torch.empty(1)
        while True:
            self._channel.hear(Parcel(peer, word, LANE))
            if float(word) == _NO_MORE:
                return
            self._answer(peer)

    def _answer(self, peer: int) -> None:
        with self._answering:  # one after another: there is one room
            self._live.say(self._said)
            self._channel.exchange(_parcels(peer, self._said), _parcels(peer, self._heard))
            self._live.meet(self._said, self._heard)
            self._channel.exchange([Parcel(peer, torch.tensor([_SO_HAVE_I]), LANE)], [])


class _Worker:
    """A thread that does one thing after another; what fails is raised where it is waited for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> "Future[None]":
        """Begin it, and return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        done = Future[None]()
        self._jobs.put((work, done))
        return done

    def close(self, *, wait: bool) -> None:
        """End the thread; one that still waits for a peer ends with the process."""
        self._jobs.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            try:
                work()
            except BaseException as failure:  # noqa: BLE001 - raised where it is waited for
                done.set_exception(failure)
            else:
                done.set_result(None)


def _done() -> "Future[None]":
    done = Future[None]()
    done.set_result(None)
    return done


def _parcels(peer: int, tensors: Sequence[Tensor]) -> list[Parcel]:
    return [Parcel(peer, tensor, LANE) for tensor in tensors]

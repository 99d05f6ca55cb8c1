"""Where messages and updates happen beside the computation: on a GPU, streams of their own.

On a CPU a message that is over has been waited for. On a GPU nothing is waited for by the host:
what is queued aside comes after what the model's stream holds at that moment (memory that it has
just given back is therefore free), and the model's stream waits where the plan says so. Memory that
is used aside is given back once the model's stream has waited for it, or it is over.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from stretto.comm.channel import Finished, Pending


class Aside(Protocol):
    """Somewhere else to do things, in order: to send, and to work on what is sent or has come."""

    def working(self) -> AbstractContextManager[None]:
        """Work there on what is inside, after all that has been done here."""
        ...

    def send(
        self, start: Callable[[], Pending], lane: int = 0, *, worked_on: bool = False
    ) -> Pending:
        """Begin a message there, after all that has been done here, and its work, if it had any.

        It comes behind those of its lane; lanes go on beside each other.
        """
        ...

    def landing(self) -> AbstractContextManager[None]:
        """Work there on what is inside, after the message that was sent last."""
        ...

    def mark(self, name: Hashable, *, worked_on: bool) -> None:
        """Give the message that was sent last a name, and the work on it, if it had any."""
        ...

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Let what is done here from now on come after what has these names."""
        ...

    def give_back(self, name: Hashable, release: Callable[[], None]) -> None:
        """Call ``release`` as soon as the work done so far no longer needs the memory."""
        ...

    def sweep(self) -> None:
        """Give back what can be by now."""
        ...


_HERE = nullcontext()


class Here:
    """No other place: everything is done at once, by whoever is there."""

    def working(self) -> AbstractContextManager[None]:
        """Do what is inside."""
        return _HERE

    def send(
        self, start: Callable[[], Pending], lane: int = 0, *, worked_on: bool = False
    ) -> Pending:
        """Begin; whoever wants to may wait."""
        return start()

    def landing(self) -> AbstractContextManager[None]:
        """Do what is inside."""
        return _HERE

    def mark(self, name: Hashable, *, worked_on: bool) -> None:
        """Remember nothing."""

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Wait for nothing."""

    def give_back(self, name: Hashable, release: Callable[[], None]) -> None:
        """Call ``release``."""
        release()

    def sweep(self) -> None:
        """Do nothing."""


class Streams:
    """Streams of a GPU: one for each lane, which only waits for messages, and one that works.

    Were they one, every message would stand behind the small kernels of the update before it, and
    those behind whatever the model computes. Both come before the model's own kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[int, torch.cuda.Stream] = {}
        self._sending = self._lane(0)
        """The lane of the message that was sent last."""
        self._working = torch.cuda.Stream(device, priority=-1)
        self._ends: dict[Hashable, torch.cuda.Event] = {}
        self._kept: list[tuple[Hashable, torch.cuda.Event, Callable[[], None]]] = []

    def _lane(self, number: int) -> torch.cuda.Stream:
        if number not in self._lanes:
            self._lanes[number] = torch.cuda.Stream(self._device, priority=-1)
        return self._lanes[number]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Queue what is inside behind what the current stream holds."""
        self._working.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._working):
            yield

    def send(
        self, start: Callable[[], Pending], lane: int = 0, *, worked_on: bool = False
    ) -> Pending:
        """Queue the message behind what the current stream holds, and what was worked on."""
        self._sending = self._lane(lane)
        self._sending.wait_event(torch.cuda.current_stream().record_event())
        if worked_on:
            self._sending.wait_event(self._working.record_event())
        with torch.cuda.stream(self._sending):
            start().wait()
        return Finished(time.monotonic())

    @contextmanager
    def landing(self) -> Iterator[None]:
        """Queue what is inside behind the message."""
        self._working.wait_event(self._sending.record_event())
        with torch.cuda.stream(self._working):
            yield

    def mark(self, name: Hashable, *, worked_on: bool) -> None:
        """Record an event."""
        self._ends[name] = (self._working if worked_on else self._sending).record_event()

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Let the current stream wait; what was kept for these names is given back."""
        wanted = set(names)
        current = torch.cuda.current_stream()
        for name in wanted:
            if name in self._ends:
                current.wait_event(self._ends[name])
        self._release(lambda name, _end: name in wanted)

    def give_back(self, name: Hashable, release: Callable[[], None]) -> None:
        """Keep it until the current stream has waited for what is queued, or that is over."""
        self._kept.append((name, self._working.record_event(), release))

    def sweep(self) -> None:
        """Give back what is over; asks the GPU, waits for nothing."""
        self._release(lambda _name, end: end.query())

    def _release(self, which: Callable[[Hashable, torch.cuda.Event], bool]) -> None:
        kept, self._kept = self._kept, []
        for name, end, release in kept:
            if which(name, end):
                release()
            else:
                self._kept.append((name, end, release))

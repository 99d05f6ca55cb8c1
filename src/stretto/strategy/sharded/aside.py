"""Where messages and updates happen beside the computation: on a GPU, streams of their own.

On a CPU a message that is over has been waited for. On a GPU nothing is waited for by the host:
what is queued aside comes after what the model's stream holds at that moment (memory that it has
just given back is therefore free), and the model's stream waits where the plan says so. Memory that
is used aside is given back once the model's stream has waited for it, or it is over.

Messages are spoken of by name, so that each waits for what it needs and for nothing else: one that
gathers must come after the update of what it carries, not after every update before it, which
would wait for a sum on another lane.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from stretto.comm.channel import Finished, Pending


class Aside(Protocol):
    """Somewhere else to do things, in order: to send, and to work on what has come."""

    def send(
        self,
        name: Hashable,
        start: Callable[[], Pending],
        lane: int = 0,
        *,
        after: Iterable[Hashable] = (),
    ) -> Pending:
        """Begin a message there, after all that has been done here and what ``after`` names.

        It comes behind those of its lane; lanes go on beside each other.
        """
        ...

    def landing(self, name: Hashable) -> AbstractContextManager[None]:
        """Work there on what a message brought; its name stands for that work, too, from then."""
        ...

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Let what is done here from now on come after what has these names."""
        ...

    def give_back(self, names: Sequence[Hashable], release: Callable[[], None]) -> None:
        """Call ``release`` as soon as what has these names no longer needs the memory."""
        ...

    def sweep(self) -> None:
        """Give back what can be by now."""
        ...


_HERE = nullcontext()


class Here:
    """No other place: everything is done at once, by whoever is there."""

    def send(
        self,
        name: Hashable,
        start: Callable[[], Pending],
        lane: int = 0,
        *,
        after: Iterable[Hashable] = (),
    ) -> Pending:
        """Begin; whoever wants to may wait."""
        return start()

    def landing(self, name: Hashable) -> AbstractContextManager[None]:
        """Do what is inside."""
        return _HERE

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Wait for nothing."""

    def give_back(self, names: Sequence[Hashable], release: Callable[[], None]) -> None:
        """Call ``release``."""
        release()

    def sweep(self) -> None:
        """Do nothing."""


class Streams:
    """Streams of a GPU: one for each lane, which waits for messages, and one that works.

    Were they one, every message would stand behind the small kernels of the update before it, and
    those behind whatever the model computes. Both come before the model's own kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[int, torch.cuda.Stream] = {}
        self._working = torch.cuda.Stream(device, priority=-1)
        self._ends: dict[Hashable, torch.cuda.Event] = {}
        self._kept: list[tuple[dict[Hashable, torch.cuda.Event], Callable[[], None]]] = []

    def _lane(self, number: int) -> torch.cuda.Stream:
        if number not in self._lanes:
            self._lanes[number] = torch.cuda.Stream(self._device, priority=-1)
        return self._lanes[number]

    def send(
        self,
        name: Hashable,
        start: Callable[[], Pending],
        lane: int = 0,
        *,
        after: Iterable[Hashable] = (),
    ) -> Pending:
        """Queue the message behind what the current stream holds, and what ``after`` names."""
        stream = self._lane(lane)
        stream.wait_event(torch.cuda.current_stream().record_event())
        for before in after:
            if before in self._ends:
                stream.wait_event(self._ends[before])
        with torch.cuda.stream(stream):
            start().wait()
        self._ends[name] = stream.record_event()
        return Finished(time.monotonic())

    @contextmanager
    def landing(self, name: Hashable) -> Iterator[None]:
        """Queue what is inside behind the message."""
        self._working.wait_event(self._ends[name])
        with torch.cuda.stream(self._working):
            yield
        self._ends[name] = self._working.record_event()

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Let the current stream wait; what was kept for these names is given back."""
        wanted = set(names)
        current = torch.cuda.current_stream()
        for name in wanted:
            if name in self._ends:
                current.wait_event(self._ends[name])
        self._release(lambda name, _end: name in wanted)

    def give_back(self, names: Sequence[Hashable], release: Callable[[], None]) -> None:
        """Keep it until the current stream has waited for each of them, or it is over."""
        ends = {name: self._ends[name] for name in names if name in self._ends}
        self._kept.append((ends, release))

    def sweep(self) -> None:
        """Give back what is over; asks the GPU, waits for nothing."""
        self._release(lambda _name, end: end.query())

    def _release(self, is_over: Callable[[Hashable, torch.cuda.Event], bool]) -> None:
        kept, self._kept = self._kept, []
        for ends, release in kept:
            left = {name: end for name, end in ends.items() if not is_over(name, end)}
            if left:
                self._kept.append((left, release))
            else:
                release()

"""Where messages and updates happen beside the computation: on a GPU, a stream of their own.

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
    """Somewhere else to do things, in order."""

    def after_now(self) -> AbstractContextManager[None]:
        """Do what is inside there, after all that has been done here."""
        ...

    def queue(self, pending: Pending) -> Pending:
        """Let what is done there from now on come after ``pending``; return what is left of it."""
        ...

    def mark(self, name: Hashable) -> None:
        """Give what has been done there so far a name."""
        ...

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Let what is done here from now on come after what has these names."""
        ...

    def give_back(self, name: Hashable, release: Callable[[], None]) -> None:
        """Call ``release`` as soon as what has this name no longer needs the memory."""
        ...

    def sweep(self) -> None:
        """Give back what can be by now."""
        ...


_HERE = nullcontext()


class Here:
    """No other place: everything is done at once."""

    def after_now(self) -> AbstractContextManager[None]:
        """Do what is inside."""
        return _HERE

    def queue(self, pending: Pending) -> Pending:
        """Leave it to whoever waits."""
        return pending

    def mark(self, name: Hashable) -> None:
        """Remember nothing."""

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Wait for nothing."""

    def give_back(self, name: Hashable, release: Callable[[], None]) -> None:
        """Call ``release``."""
        release()

    def sweep(self) -> None:
        """Do nothing."""


class Stream:
    """A stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._ends: dict[Hashable, torch.cuda.Event] = {}
        self._kept: list[tuple[Hashable, torch.cuda.Event, Callable[[], None]]] = []

    @contextmanager
    def after_now(self) -> Iterator[None]:
        """Queue what is inside on the stream, behind what the current one holds."""
        self._stream.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._stream):
            yield

    def queue(self, pending: Pending) -> Pending:
        """Let the stream, which is the current one, wait; nobody else has to."""
        pending.wait()
        return Finished(time.monotonic())

    def mark(self, name: Hashable) -> None:
        """Record an event."""
        self._ends[name] = self._stream.record_event()

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
        self._kept.append((name, self._stream.record_event(), release))

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

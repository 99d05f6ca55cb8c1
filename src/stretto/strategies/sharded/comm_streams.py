"""CUDA side streams for the messages and updates of the sharded strategy.

On a CPU a thread waits for each message. On a GPU the host never waits. Work on a side stream is
queued behind everything that the main stream holds at that moment, so memory that the main stream
has just freed may be reused. The main stream waits for an event where the plan says so. Memory used
on a side stream is freed once the main stream has waited for its event, or the event has completed.

Messages have names, so that each waits only for the messages it depends on. An all-gather must
wait for the update of its own block. If it waited for all earlier updates, it would also wait for
reductions on other lanes.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from stretto.comm.transport import CompletedWork, Work


class CommStreams(Protocol):
    """Runs messages, and the work that follows their completion, beside the main stream."""

    def send(
        self,
        name: Hashable,
        start: Callable[[], Work],
        lane: int = 0,
        *,
        after: Iterable[Hashable] = (),
    ) -> Work:
        """Start a message after all earlier work of the main stream and the messages ``after``.

        Messages of one lane run in order; lanes run concurrently.
        """
        ...

    def on_complete(self, name: Hashable) -> AbstractContextManager[None]:
        """Run the body after the message; waiting for ``name`` then includes the body."""
        ...

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Make all later work of the main stream wait for the messages ``names``."""
        ...

    def release_after(self, names: Sequence[Hashable], release: Callable[[], None]) -> None:
        """Call ``release`` once the messages ``names`` no longer use the memory."""
        ...

    def release_finished(self) -> None:
        """Call the releases whose messages have completed."""
        ...


_NO_STREAM = nullcontext()


class InlineStreams:
    """Runs everything immediately on the calling thread, for the CPU."""

    def send(
        self,
        name: Hashable,
        start: Callable[[], Work],
        lane: int = 0,
        *,
        after: Iterable[Hashable] = (),
    ) -> Work:
        """Start the message and return its work."""
        return start()

    def on_complete(self, name: Hashable) -> AbstractContextManager[None]:
        """Run the body."""
        return _NO_STREAM

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Do nothing: completed messages have been waited for."""

    def release_after(self, names: Sequence[Hashable], release: Callable[[], None]) -> None:
        """Call ``release``."""
        release()

    def release_finished(self) -> None:
        """Do nothing: there are no deferred releases."""


class SideStreams:
    """CUDA streams: one for the messages of each lane, and one for updates.

    On a single stream every message would wait for the update kernels before it. All of them have a
    higher priority than the main stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[int, torch.cuda.Stream] = {}
        self._update_stream = torch.cuda.Stream(device, priority=-1)
        self._end_events: dict[Hashable, torch.cuda.Event] = {}
        self._deferred_releases: list[
            tuple[dict[Hashable, torch.cuda.Event], Callable[[], None]]
        ] = []

    def _lane(self, number: int) -> torch.cuda.Stream:
        if number not in self._lanes:
            self._lanes[number] = torch.cuda.Stream(self._device, priority=-1)
        return self._lanes[number]

    def send(
        self,
        name: Hashable,
        start: Callable[[], Work],
        lane: int = 0,
        *,
        after: Iterable[Hashable] = (),
    ) -> Work:
        """Queue the message behind all work of the current stream and the messages ``after``."""
        stream = self._lane(lane)
        stream.wait_event(torch.cuda.current_stream().record_event())
        for predecessor in after:
            if predecessor in self._end_events:
                stream.wait_event(self._end_events[predecessor])
        with torch.cuda.stream(stream):
            start().wait()
        self._end_events[name] = stream.record_event()
        return CompletedWork(time.monotonic())

    @contextmanager
    def on_complete(self, name: Hashable) -> Iterator[None]:
        """Queue the body on the update stream, behind the message."""
        self._update_stream.wait_event(self._end_events[name])
        with torch.cuda.stream(self._update_stream):
            yield
        self._end_events[name] = self._update_stream.record_event()

    def wait_for(self, names: Iterable[Hashable]) -> None:
        """Make the current stream wait for the messages, then release their memory."""
        requested = set(names)
        current = torch.cuda.current_stream()
        for name in requested:
            if name in self._end_events:
                current.wait_event(self._end_events[name])
        self._release(lambda name, _end: name in requested)

    def release_after(self, names: Sequence[Hashable], release: Callable[[], None]) -> None:
        """Defer ``release`` until each message was waited for or its event has completed."""
        ends = {name: self._end_events[name] for name in names if name in self._end_events}
        self._deferred_releases.append((ends, release))

    def release_finished(self) -> None:
        """Call the releases whose events have completed; queries events without waiting."""
        self._release(lambda _name, end: end.query())

    def _release(self, is_finished: Callable[[Hashable, torch.cuda.Event], bool]) -> None:
        deferred_releases, self._deferred_releases = self._deferred_releases, []
        for ends, release in deferred_releases:
            remaining = {name: end for name, end in ends.items() if not is_finished(name, end)}
            if remaining:
                self._deferred_releases.append((remaining, release))
            else:
                release()

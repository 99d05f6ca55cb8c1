"""Errands on a GPU: no thread runs them; each lane is a stream, and order is kept by events."""

import torch

from stretto.comm.channel import Channel
from stretto.comm.errand import Errand


class StreamFlight:
    """An errand queued on the GPU; `wait` makes the current stream wait, not the host."""

    def __init__(self, ends: list[torch.cuda.Event]) -> None:
        self._ends = ends
        self.finished_s: float | None = None
        """Not known to the host without asking the GPU."""

    def wait(self) -> None:
        """Let what is queued on the current stream from now on come after the errand."""
        stream = torch.cuda.current_stream()
        for end in self._ends:
            stream.wait_event(end)

    def query(self) -> bool:
        """Return whether the GPU is through with it."""
        return all(end.query() for end in self._ends)


class Streams:
    """The lanes of one GPU."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lanes: dict[int, torch.cuda.Stream] = {}

    def start(self, errand: Errand) -> StreamFlight:
        """Queue every leg on its lane's stream, in program order; nothing blocks the host."""
        ready = torch.cuda.current_stream().record_event()
        done: dict[int, torch.cuda.Event] = {}
        last: dict[int, torch.cuda.Event] = {}
        for leg in errand.legs:
            stream = self._stream(leg.lane)
            if leg.lane not in last:
                stream.wait_event(ready)
            for needed in leg.waits:
                stream.wait_event(done[needed])
            with torch.cuda.stream(stream):
                leg.run(self._channel)
            done[leg.index] = last[leg.lane] = stream.record_event()
        flight = StreamFlight(list(last.values()))
        self._channel.watch(errand.layout, flight.query)
        return flight

    def _stream(self, lane: int) -> torch.cuda.Stream:
        if lane not in self._lanes:
            self._lanes[lane] = torch.cuda.Stream()
        return self._lanes[lane]

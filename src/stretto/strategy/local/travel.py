"""How a fragment learns what its peers have come to: all of them, or one.

Note: one lane apart. A sum may be under way from one step to the next, and meanwhile others use
lane 0 (a run that goes back to a checkpoint spreads it there). Messages of one lane arrive in the
order in which they were sent, so fragments keep to lanes of their own.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from stretto.comm.channel import Channel, Finished, Parcel, Pending
from stretto.comm.courier import Courier
from stretto.comm.errand import Errand
from stretto.comm.schedule import Placing, Schedule
from stretto.topology import Topology


class Travel(Protocol):
    """One fragment's way to its peers and back."""

    room: Tensor
    """What travels, flat; once it is there, what a checkpoint keeps of it."""

    def leave(self, start: Tensor, now: Tensor, number: int) -> None:
        """Begin to tell peers of round ``number`` where this rank began, and where it is now."""
        ...

    def wait(self) -> None:
        """Return when everything is there; nothing counts by that."""
        ...

    def moved(self, start: Tensor) -> Tensor:
        """Return how far the peers' mean is below ``start``, as a new tensor, once waited for."""
        ...


def room_for(parameters: Sequence[nn.Parameter], wire: torch.dtype | None = None) -> Tensor:
    """Return a flat tensor for one element of each, of the wire's type or that they are kept in.

    Parameters of 16 bits are kept in 32: what a round adds to them may be below their last digit.
    """
    first = parameters[0]
    kept = wire or torch.promote_types(first.dtype, torch.float32)
    return torch.empty(sum(p.numel() for p in parameters), dtype=kept, device=first.device)


def beside(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with its lanes moved on by one; see the note above."""
    placing = Placing(range(schedule.size), lane=1)
    name = f"{schedule.name} beside others"
    return replace(schedule, name=name, program=lambda rank: placing.program(schedule, rank))


class Everybody:
    """Sums the differences of all ranks, in the background."""

    def __init__(self, courier: Courier, errand: Errand) -> None:
        self.room = errand.flat
        self._courier, self._errand = courier, errand
        self._pending: Pending = Finished(time.monotonic())

    def leave(self, start: Tensor, now: Tensor, number: int) -> None:
        """Begin the sum."""
        self.room.copy_(start - now)
        self._pending = self._courier.start(self._errand)

    def wait(self) -> None:
        """Return when the sum is there."""
        self._pending.wait()

    def moved(self, start: Tensor) -> Tensor:
        """Return the mean of differences; the same bits on all ranks."""
        return self.room.to(start.dtype) / self._errand.schedule.size


class Pair:
    """Averages with the round's partner, at once; whoever has none is their own."""

    def __init__(self, channel: Channel, who: Topology, room: Tensor, segment: int) -> None:
        self.room = room
        self._channel, self._who, self._segment = channel, who, segment

    def leave(self, start: Tensor, now: Tensor, number: int) -> None:
        """Exchange what both have come to."""
        peers = self._who(self._channel.rank, self._channel.size, number, self._segment)
        heard = [torch.empty_like(now) for _ in peers.receives]
        self._channel.exchange(
            [Parcel(edge.rank, now) for edge in peers.sends],
            [Parcel(edge.rank, one) for edge, one in zip(peers.receives, heard, strict=True)],
        )
        self.room.copy_(now * peers.own)
        for edge, one in zip(peers.receives, heard, strict=True):
            self.room.add_(one, alpha=edge.weight)

    def wait(self) -> None:
        """Return: it is there."""

    def moved(self, start: Tensor) -> Tensor:
        """Return this rank's start less the pair's mean."""
        return start - self.room

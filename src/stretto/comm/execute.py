"""Run a `Schedule` on a tensor over a `Channel`."""

import time

import torch
from torch import Tensor

from stretto.comm.channel import Channel, Finished, Parcel, Pending
from stretto.comm.schedule import Action, Op, Schedule, chunk_bounds, rounds
from stretto.errors import ScheduleError


class Scratch:
    """Room for what arrives before it is added: grown once, then reused round after round."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def cut(self, sizes: list[int], like: Tensor) -> list[Tensor]:
        """Return tensors of ``sizes`` elements, valid until the next call."""
        key, needed = (like.dtype, like.device), sum(sizes)
        room = self._rooms.get(key)
        if room is None or room.numel() < needed:
            room = self._rooms[key] = like.new_empty(needed)
        return list(room[:needed].split(sizes))


@torch.no_grad()
def execute(
    schedule: Schedule, tensor: Tensor, channel: Channel, scratch: Scratch | None = None
) -> None:
    """Apply ``schedule`` to the contiguous ``tensor`` in place; every rank calls this together."""
    start(schedule, tensor, channel, scratch).wait()


@torch.no_grad()
def start(
    schedule: Schedule, tensor: Tensor, channel: Channel, scratch: Scratch | None = None
) -> Pending:
    """Begin ``schedule``; only the back end's own collective returns before it is done."""
    if channel.size != schedule.size:
        raise ScheduleError(
            f"{schedule.name} was made for {schedule.size} ranks, the channel has {channel.size}"
        )
    flat = tensor.view(-1)
    if schedule.native:
        return channel.start_all_reduce(flat)
    bounds = chunk_bounds(flat.numel(), schedule.num_chunks)
    scratch = scratch or Scratch()
    for batch in rounds(schedule, channel.rank):
        _run_round(batch, flat, bounds, channel, scratch)
    return Finished(time.monotonic())


def _run_round(
    batch: tuple[Op, ...], flat: Tensor, bounds: tuple[int, ...], channel: Channel, scratch: Scratch
) -> None:
    # Short tensors leave some chunks empty; both ends compute the same bounds and skip them.
    places = [
        (op, flat[bounds[op.start] : bounds[op.stop]])
        for op in batch
        if bounds[op.start] < bounds[op.stop]
    ]
    adding = [(op, place) for op, place in places if op.action is Action.ADD]
    arrived = scratch.cut([place.numel() for _, place in adding], flat)
    landing = {
        id(op): room for (op, _), room in zip(adding, arrived, strict=True)
    }  # keyed by identity: two equal operations may meet in one round
    channel.exchange(
        [Parcel(op.peer, place, op.lane) for op, place in places if op.action is Action.SEND],
        [
            Parcel(op.peer, landing.get(id(op), place), op.lane)
            for op, place in places
            if op.action is not Action.SEND
        ],
    )
    for (_, place), room in zip(adding, arrived, strict=True):
        place.add_(room)

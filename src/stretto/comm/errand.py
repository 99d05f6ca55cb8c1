"""A schedule laid on a tensor: for one rank, every view cut and every parcel addressed, once.

Made before the first message and used again and again: running it allocates nothing.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.comm.channel import Channel, Parcel
from stretto.comm.codecs.codec import Codec, Laid, unsent_sums
from stretto.comm.schedule import Action, Op, Round, Schedule, chunk_bounds, rounds
from stretto.errors import ChannelError, ScheduleError


class Scratch:
    """Room for what arrives before it is added: one per lane, grown when an errand needs more.

    A lane runs one round at a time, so all its rounds and errands share it; ``use`` tells apart
    what one round needs at the same time. One that is ``lent`` has memory only while errands are
    laid out or run, unless it is on a GPU.
    """

    def __init__(self, *, lent: bool = False) -> None:
        self._lent = lent
        self._rooms: dict[tuple[int, str, torch.dtype, torch.device], Tensor] = {}
        self._of_lane: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._open: set[int] = set()
        self._changing = threading.Lock()  # lanes run while others are laid out

    def cut(self, lane: int, sizes: list[int], like: Tensor, use: str = "arrived") -> list[Tensor]:
        """Return tensors of ``sizes`` elements for one round of ``lane``."""
        key, needed = (lane, use, like.dtype, like.device), sum(sizes)
        room = self._rooms.get(key)
        if room is None or room.numel() < needed:
            room = self._rooms[key] = like.new_empty(needed)
            if self._lent and not room.is_cuda:
                self._of_lane[lane].append(room)
        return list(room[:needed].split(sizes))

    @contextmanager
    def laying_out(self) -> Iterator[None]:
        """Let views be cut in here: of rooms without memory there are none."""
        with self._changing:
            self._fill(self._of_lane)
            yield
            for lane in self._of_lane.keys() - self._open:
                self._empty(lane)

    def open(self, lane: int) -> None:
        """Give the rooms of ``lane`` memory: an errand begins there."""
        if not self._lent:
            return
        with self._changing:
            self._open.add(lane)
            self._fill([lane])

    def close(self, lane: int) -> None:
        """Take it back: nothing goes on there."""
        if not self._lent:
            return
        with self._changing:
            self._open.discard(lane)
            self._empty(lane)

    def _fill(self, lanes: Iterable[int]) -> None:
        for room in (room for lane in lanes for room in self._of_lane[lane]):
            if not room.untyped_storage().nbytes():
                room.untyped_storage().resize_(room.nbytes)

    def _empty(self, lane: int) -> None:
        for room in self._of_lane[lane]:
            room.untyped_storage().resize_(0)


@dataclass(frozen=True, slots=True)
class Coding:
    """What a codec does around one exchange; nothing where there is none."""

    encodes: tuple[Laid, ...] = ()
    """What leaves, before the exchange."""
    decodes: tuple[Laid, ...] = ()
    """What arrived, after it."""
    sums: tuple[Laid, ...] = ()
    """Sums that leave no more: rounded here, as the others are given them."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One round on real tensors."""

    index: int
    lane: int
    waits: tuple[int, ...]
    sends: list[Parcel]
    receives: list[Parcel]
    additions: list[tuple[Tensor, Tensor]]
    """(where the sum is, what arrived for it)"""
    what: str
    """For whoever must be told where it failed."""
    coding: Coding = Coding()

    def run(self, channel: Channel) -> None:
        """Exchange, then add what arrived, in program order."""
        for leaving in self.coding.encodes:
            leaving.encode()
        try:
            channel.exchange(self.sends, self.receives)
        except ChannelError as failure:
            raise ChannelError(f"{failure}; in {self.what}") from failure
        for coded in self.coding.decodes:
            coded.decode()
        for place, arrived in self.additions:
            place.add_(arrived)
        for total in self.coding.sums:
            total.encode()


@dataclass(frozen=True, slots=True)
class Errand:
    """One collective of one rank, ready to run as often as wanted; owns views, not the tensor."""

    schedule: Schedule
    flat: Tensor
    legs: tuple[Leg, ...]
    lanes: tuple[int, ...]
    """The lanes it uses."""
    needs_room: bool
    """Whether something arrives that does not belong where it arrives."""
    layout: str
    """What must be equal on all ranks before the first message is sent."""


def lay_out(
    schedule: Schedule, tensor: Tensor, rank: int, scratch: Scratch, codec: Codec | None = None
) -> Errand:
    """Return the errand of ``rank`` on the contiguous ``tensor``, encoded by ``codec`` if any."""
    if not tensor.is_contiguous():
        raise ScheduleError(f"{schedule.name}: the tensor must be contiguous to travel in place")
    flat = tensor.detach().view(-1)
    if codec is not None:
        codec.check(flat)
        if schedule.native:
            raise ScheduleError(
                f"{schedule.name} is carried out by the back end, which cannot sum what is encoded "
                f"as {codec.name}: take another algorithm, or a wire that is a plain type"
            )
    legs = () if schedule.native else tuple(_legs(schedule, flat, rank, scratch, codec))
    lanes = tuple(dict.fromkeys(leg.lane for leg in legs))
    coded = f" as {codec.name}" if codec else ""
    layout = f"{schedule.name} over {flat.numel()} x {flat.dtype}{coded}"
    needs_room = codec is not None or any(leg.additions for leg in legs)
    return Errand(schedule, flat, legs, lanes, needs_room, layout)


def _legs(
    schedule: Schedule, flat: Tensor, rank: int, scratch: Scratch, codec: Codec | None
) -> Iterator[Leg]:
    ground = _Ground(flat, chunk_bounds(flat.numel(), schedule.num_chunks), scratch)
    cut = rounds(schedule, rank)
    unsent = unsent_sums(cut, schedule.num_chunks)
    for index, batch in enumerate(cut):
        load = ground.coded(batch, codec, unsent[index]) if codec else ground.plain(batch)
        yield Leg(
            index,
            batch.lane,
            batch.waits,
            [Parcel(op.peer, t, op.lane) for op, t in load.parcels if op.action is Action.SEND],
            [Parcel(op.peer, t, op.lane) for op, t in load.parcels if op.action is not Action.SEND],
            load.additions,
            _describe(schedule, rank, index, len(cut), batch),
            load.coding,
        )


class _Load(NamedTuple):
    """What one round moves: the tensor of each message, the sums to make, the coding."""

    parcels: list[tuple[Op, Tensor]]
    additions: list[tuple[Tensor, Tensor]]
    coding: Coding = Coding()


class _Ground(NamedTuple):
    """Where a schedule's chunks lie in the tensor."""

    flat: Tensor
    bounds: tuple[int, ...]
    scratch: Scratch

    def plain(self, batch: Round) -> _Load:
        """Send places as they are; what is to be added arrives beside them."""
        # Short tensors leave some chunks empty; both ends compute the same bounds and skip them.
        ops = [op for op in batch.ops if self.bounds[op.start] < self.bounds[op.stop]]
        adding = [self._place(op.start, op.stop) for op in ops if op.action is Action.ADD]
        arrived = self.scratch.cut(batch.lane, [place.numel() for place in adding], self.flat)
        rooms = iter(arrived)
        return _Load(
            [
                (op, next(rooms) if op.action is Action.ADD else self._place(op.start, op.stop))
                for op in ops
            ],
            list(zip(adding, arrived, strict=True)),
        )

    def coded(self, batch: Round, codec: Codec, unsent: Sequence[tuple[int, int]]) -> _Load:
        """Send bytes instead; ``unsent`` are the chunks whose sums nobody is sent."""
        plain = self.plain(batch)
        stretches = [(place, self._lengths(op.start, op.stop)) for op, place in plain.parcels]
        messages = self._lay(batch.lane, codec, stretches)
        # By the time sums are rounded the bytes of the messages have been used.
        sums = [(self._place(*chunks), self._lengths(*chunks)) for chunks in unsent]
        rounded = self._lay(batch.lane, codec, sums)
        ops = [op for op, _ in plain.parcels]
        pairs = list(zip(ops, messages, strict=True))
        return _Load(
            [(op, wire) for op, (wire, _) in pairs],
            plain.additions,
            Coding(
                tuple(laid for op, (_, laid) in pairs if op.action is Action.SEND),
                tuple(laid for op, (_, laid) in pairs if op.action is not Action.SEND),
                tuple(laid for _, laid in rounded),
            ),
        )

    def _lay(
        self, lane: int, codec: Codec, stretches: Sequence[tuple[Tensor, list[int]]]
    ) -> list[tuple[Tensor, Laid]]:
        """Give each stretch, chunks of the lengths beside it, its bytes to be sent as."""
        sizes = [codec.num_bytes(lengths) for _, lengths in stretches]
        device = self.flat.device
        working = max((codec.num_working(lengths, device) for _, lengths in stretches), default=0)
        wires = self.scratch.cut(lane, sizes, self.flat.new_empty(0, dtype=torch.uint8))
        (work,) = self.scratch.cut(lane, [working], self.flat, "work")
        return [
            (wire, codec.lay(place, lengths, wire, work))
            for (place, lengths), wire in zip(stretches, wires, strict=True)
        ]

    def _place(self, start: int, stop: int) -> Tensor:
        return self.flat[self.bounds[start] : self.bounds[stop]]

    def _lengths(self, start: int, stop: int) -> list[int]:
        return [self.bounds[chunk + 1] - self.bounds[chunk] for chunk in range(start, stop)]


def _describe(schedule: Schedule, rank: int, index: int, count: int, batch: Round) -> str:
    words = {Action.SEND: "sends {} to", Action.ADD: "adds {} from", Action.COPY: "takes {} from"}
    ops = ", ".join(
        f"{words[op.action].format(f'chunks {op.start}..{op.stop}')} rank {op.peer}"
        for op in batch.ops
    )
    return (
        f"{schedule.name} for {schedule.size} ranks, round {index + 1} of {count} of rank {rank}, "
        f"which {ops}"
    )

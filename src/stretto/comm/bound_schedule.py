"""Binds a schedule to a tensor: the views, buffers and messages of one rank, created once.

The result is reused in every step, so that running a collective allocates nothing.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.collectives.codecs import BoundCodec, Codec, unsent_sums
from stretto.collectives.schedule import Action, Op, Round, Schedule, chunk_bounds, rounds
from stretto.comm.transport import P2POp, Transport
from stretto.errors import ScheduleError, TransportError


class BufferPool:
    """Receive buffers: one for each lane, which grows when a schedule needs a larger one.

    A lane runs one round at a time, so all its rounds and schedules share the buffer. Buffers that
    one round needs at the same time have different ``purpose`` strings. With ``free_idle``, CPU
    buffers have memory only while schedules are bound or run; GPU buffers always keep theirs.
    """

    def __init__(self, *, free_idle: bool = False) -> None:
        self._free_idle = free_idle
        self._buffers: dict[tuple[int, str, torch.dtype, torch.device], Tensor] = {}
        self._buffers_of_lane: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._open_lanes: set[int] = set()
        self._lock = threading.Lock()  # lanes may run while other schedules are bound

    def get_buffers(
        self, lane: int, sizes: list[int], like: Tensor, purpose: str = "arrived"
    ) -> list[Tensor]:
        """Return buffers of ``sizes`` elements for a round of ``lane``, typed as ``like``."""
        key, needed = (lane, purpose, like.dtype, like.device), sum(sizes)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < needed:
            buffer = self._buffers[key] = like.new_empty(needed)
            if self._free_idle and not buffer.is_cuda:
                self._buffers_of_lane[lane].append(buffer)
        return list(buffer[:needed].split(sizes))

    @contextmanager
    def hold_for_binding(self) -> Iterator[None]:
        """Keep memory in all buffers inside: views of a tensor without memory cannot be made."""
        with self._lock:
            self._allocate(self._buffers_of_lane)
            yield
            for lane in self._buffers_of_lane.keys() - self._open_lanes:
                self._free(lane)

    def open(self, lane: int) -> None:
        """Allocate the buffers of ``lane``, because a schedule starts there."""
        if not self._free_idle:
            return
        with self._lock:
            self._open_lanes.add(lane)
            self._allocate([lane])

    def close(self, lane: int) -> None:
        """Free the buffers of ``lane``, because nothing runs there."""
        if not self._free_idle:
            return
        with self._lock:
            self._open_lanes.discard(lane)
            self._free(lane)

    def _allocate(self, lanes: Iterable[int]) -> None:
        for buffer in (buffer for lane in lanes for buffer in self._buffers_of_lane[lane]):
            if not buffer.untyped_storage().nbytes():
                buffer.untyped_storage().resize_(buffer.nbytes)

    def _free(self, lane: int) -> None:
        for buffer in self._buffers_of_lane[lane]:
            buffer.untyped_storage().resize_(0)


@dataclass(frozen=True, slots=True)
class CodecCalls:
    """The codec calls around one exchange; empty without a codec."""

    to_encode: tuple[BoundCodec, ...] = ()
    """Messages to encode before the exchange."""
    to_decode: tuple[BoundCodec, ...] = ()
    """Messages to decode after the exchange."""
    to_round: tuple[BoundCodec, ...] = ()
    """Sums that this rank never sends. Rounding them makes them equal to the peers' copies."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One round of a schedule, bound to tensors."""

    index: int
    lane: int
    waits_for: tuple[int, ...]
    sends: list[P2POp]
    receives: list[P2POp]
    additions: list[tuple[Tensor, Tensor]]
    """Pairs (target, received); ``received`` is added to ``target`` in place."""
    description: str
    """The schedule, the round and its messages, for error messages."""
    codec_calls: CodecCalls = CodecCalls()

    def run(self, transport: Transport) -> None:
        """Exchange the messages, then add the received ones, in program order.

        Raises:
            TransportError: The exchange failed; the message names this stage.
        """
        for outgoing in self.codec_calls.to_encode:
            outgoing.encode()
        try:
            transport.exchange(self.sends, self.receives)
        except TransportError as failure:
            raise TransportError(f"{failure}; in {self.description}") from failure
        for incoming in self.codec_calls.to_decode:
            incoming.decode()
        for target, arrived in self.additions:
            target.add_(arrived)
        for total in self.codec_calls.to_round:
            total.encode()


@dataclass(frozen=True, slots=True)
class BoundSchedule:
    """One rank's part of a collective on one tensor, which can be run any number of times."""

    schedule: Schedule
    flat: Tensor
    """A flat view of the tensor."""
    stages: tuple[Stage, ...]
    lanes: tuple[int, ...]
    """The lanes that the stages use."""
    needs_buffers: bool
    """Whether some messages arrive in buffers of the pool instead of the tensor itself."""
    layout: str
    """Schedule, size, type and codec as text; must be equal on all ranks."""


def bind(
    schedule: Schedule,
    tensor: Tensor,
    rank: int,
    buffer_pool: BufferPool,
    codec: Codec | None = None,
) -> BoundSchedule:
    """Bind ``rank``'s part of ``schedule`` to the contiguous ``tensor``.

    Every message is encoded by ``codec``, if there is one.

    Raises:
        ScheduleError: The tensor is not contiguous, or ``codec`` cannot encode it, or the back end
            runs the schedule itself and has no codec.
    """
    if not tensor.is_contiguous():
        raise ScheduleError(f"{schedule.name}: the tensor must be contiguous to travel in place")
    flat = tensor.detach().view(-1)
    if codec is not None:
        codec.check(flat)
        if schedule.native:
            raise ScheduleError(
                f"{schedule.name} is run by the back end, which cannot sum tensors encoded as "
                f"{codec.name}: choose another algorithm, or a wire that is a plain type"
            )
    stages = () if schedule.native else tuple(_stages(schedule, flat, rank, buffer_pool, codec))
    lanes = tuple(dict.fromkeys(stage.lane for stage in stages))
    codec_text = f" as {codec.name}" if codec else ""
    layout = f"{schedule.name} over {flat.numel()} x {flat.dtype}{codec_text}"
    needs_buffers = codec is not None or any(stage.additions for stage in stages)
    return BoundSchedule(schedule, flat, stages, lanes, needs_buffers, layout)


def _stages(
    schedule: Schedule, flat: Tensor, rank: int, buffer_pool: BufferPool, codec: Codec | None
) -> Iterator[Stage]:
    views = _ChunkViews(flat, chunk_bounds(flat.numel(), schedule.num_chunks), buffer_pool)
    all_rounds = rounds(schedule, rank)
    unsent = unsent_sums(all_rounds, schedule.num_chunks)
    for index, round_ in enumerate(all_rounds):
        stage_tensors = (
            views.bind_coded(round_, codec, unsent[index]) if codec else views.bind_plain(round_)
        )
        yield Stage(
            index,
            round_.lane,
            round_.waits_for,
            [
                P2POp(op.peer, t, op.lane)
                for op, t in stage_tensors.p2p_ops
                if op.action is Action.SEND
            ],
            [
                P2POp(op.peer, t, op.lane)
                for op, t in stage_tensors.p2p_ops
                if op.action is not Action.SEND
            ],
            stage_tensors.additions,
            _describe(schedule, rank, index, len(all_rounds), round_),
            stage_tensors.codec_calls,
        )


class _StageTensors(NamedTuple):
    """The tensors of one round: of each message, of each addition, of each codec call."""

    p2p_ops: list[tuple[Op, Tensor]]
    additions: list[tuple[Tensor, Tensor]]
    codec_calls: CodecCalls = CodecCalls()


class _ChunkViews(NamedTuple):
    """The chunks of a schedule as views of the tensor, with buffers for the rest."""

    flat: Tensor
    bounds: tuple[int, ...]
    buffer_pool: BufferPool

    def bind_plain(self, round_: Round) -> _StageTensors:
        """Send and copy directly in the tensor; receive in buffers what is to be added."""
        # Short tensors leave some chunks empty; both ends compute the same bounds and skip them.
        ops = [op for op in round_.ops if self.bounds[op.start] < self.bounds[op.stop]]
        sum_targets = [self._chunk_view(op.start, op.stop) for op in ops if op.action is Action.ADD]
        arrived = self.buffer_pool.get_buffers(
            round_.lane, [target.numel() for target in sum_targets], self.flat
        )
        buffers = iter(arrived)
        return _StageTensors(
            [
                (
                    op,
                    next(buffers)
                    if op.action is Action.ADD
                    else self._chunk_view(op.start, op.stop),
                )
                for op in ops
            ],
            list(zip(sum_targets, arrived, strict=True)),
        )

    def bind_coded(
        self, round_: Round, codec: Codec, unsent: Sequence[tuple[int, int]]
    ) -> _StageTensors:
        """Send encoded bytes; ``unsent`` are the chunk ranges whose sums this rank never sends."""
        tensors = self.bind_plain(round_)
        slices = [(view, self._lengths(op.start, op.stop)) for op, view in tensors.p2p_ops]
        messages = self._bind_codec(round_.lane, codec, slices)
        # The rounding may share buffers with the messages: it runs after these have been used.
        to_round = [(self._chunk_view(*chunks), self._lengths(*chunks)) for chunks in unsent]
        rounded = self._bind_codec(round_.lane, codec, to_round)
        ops = [op for op, _ in tensors.p2p_ops]
        pairs = list(zip(ops, messages, strict=True))
        return _StageTensors(
            [(op, wire) for op, (wire, _) in pairs],
            tensors.additions,
            CodecCalls(
                tuple(bound for op, (_, bound) in pairs if op.action is Action.SEND),
                tuple(bound for op, (_, bound) in pairs if op.action is not Action.SEND),
                tuple(bound for _, bound in rounded),
            ),
        )

    def _bind_codec(
        self, lane: int, codec: Codec, slices: Sequence[tuple[Tensor, list[int]]]
    ) -> list[tuple[Tensor, BoundCodec]]:
        """Return for each view, with the lengths of its chunks, its bytes and its bound codec."""
        sizes = [codec.num_bytes(lengths) for _, lengths in slices]
        device = self.flat.device
        workspace_numel = max(
            (codec.workspace_numel(lengths, device) for _, lengths in slices), default=0
        )
        wires = self.buffer_pool.get_buffers(lane, sizes, self.flat.new_empty(0, dtype=torch.uint8))
        (workspace,) = self.buffer_pool.get_buffers(lane, [workspace_numel], self.flat, "work")
        return [
            (wire, codec.bind(view, lengths, wire, workspace))
            for (view, lengths), wire in zip(slices, wires, strict=True)
        ]

    def _chunk_view(self, start: int, stop: int) -> Tensor:
        return self.flat[self.bounds[start] : self.bounds[stop]]

    def _lengths(self, start: int, stop: int) -> list[int]:
        return [self.bounds[chunk + 1] - self.bounds[chunk] for chunk in range(start, stop)]


def _describe(schedule: Schedule, rank: int, index: int, count: int, round_: Round) -> str:
    phrases = {
        Action.SEND: "sends {} to",
        Action.ADD: "adds {} from",
        Action.COPY: "copies {} from",
    }
    ops = ", ".join(
        f"{phrases[op.action].format(f'chunks {op.start}..{op.stop}')} rank {op.peer}"
        for op in round_.ops
    )
    return (
        f"{schedule.name} for {schedule.size} ranks, round {index + 1} of {count} of rank {rank}, "
        f"which {ops}"
    )

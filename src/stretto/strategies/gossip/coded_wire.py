"""Wire types of gossip; with 8 bits, quantised differences to a reference common to all ranks.

With x a rank's values, r the reference and e the residual of earlier rounds,

    d = (x - r) + e        q = Q(d) is sent        e becomes d - q

and both ends combine the *decoded* values: x moves by weight (q of the other - q of its own). The
reference is equal on all ranks and cancels in the difference. What one rank gains another loses,
so the mean does not move. Error feedback corrects the quantisation error of a round in the next
one: over many rounds a rank's errors add up to at most one e (Seide et al., 2014,
doi:10.21437/Interspeech.2014-274).

The error is relative to x - r, which grows with time; an exact average makes a new reference.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from stretto.collectives.codecs import WIRE_DTYPES, BoundCodec, Codec, Fp8
from stretto.comm.bound_schedule import BufferPool
from stretto.optim.rules import add_weighted_differences_
from stretto.strategies.gossip.groups import GossipRoute
from stretto.strategies.gossip.mixer import (
    DifferenceMixer,
    GossipRound,
    PeersOfRound,
    check_saved_length,
)
from stretto.topology import RoundPeers

CODECS: dict[str, Codec] = {"fp8": Fp8()}
"""Codecs of differences to a reference, by the name of the wire type."""
_STEP_LANE = 0
"""Buffers of the training thread; the lanes of rounds count from 1."""


def checked_wire(wire: str) -> str:
    """Return ``wire`` if it is a wire type of gossip.

    Raises:
        ValueError: It is not.
    """
    wires = (*WIRE_DTYPES, *CODECS)
    if wire not in wires:
        raise ValueError(f"expected {', '.join(wires)}, got {wire!r}")
    return wire


def make_difference_mixer(
    wire: str,
    parameters: Sequence[nn.Parameter],
    peers_of: PeersOfRound,
    route: GossipRoute,
    buffer_pool: BufferPool,
) -> DifferenceMixer:
    """Return the mixer of a segment whose parameters are sent as ``wire``.

    Segments share the codec buffers of ``buffer_pool``, one segment at a time on each lane.
    """
    if wire in CODECS:
        return CodedDifferenceMixer(parameters, CODECS[wire], peers_of, route, buffer_pool)
    return DifferenceMixer(parameters, WIRE_DTYPES[wire], peers_of, route)


class CodedDifferenceMixer(DifferenceMixer):
    """Sends encoded differences to the reference and keeps the residual that encoding left.

    For each element of its shard a rank keeps the reference and the residual, in the parameters'
    type but at least 32 bits. Every round in flight holds the codec's bytes of one sent message and
    of each received one. The buffer pool holds the decoded values of the largest shard.

    Threads: the training thread encodes. With groups of several ranks the lane's thread decodes, so
    each lane has decoding buffers of its own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        codec: Codec,
        peers_of: PeersOfRound,
        route: GossipRoute,
        buffer_pool: BufferPool,
    ) -> None:
        super().__init__(parameters, torch.uint8, peers_of, route)
        self._wire_numel = codec.num_bytes([self._shard_numel])
        self._codec, self._buffer_pool = codec, buffer_pool
        self._decode_lane = route.lane if route.group.width > 1 else _STEP_LANE
        kept = torch.promote_types(self._template.dtype, torch.float32)
        self._reference = self._template.new_empty(self._shard_numel, dtype=kept)
        self._residual = torch.zeros_like(self._reference)
        self._float32 = self._template.new_empty(0, dtype=torch.float32)
        self._max_shard_numel = max(
            shard.stop - shard.start for shard in route.group.shards(self._numel)
        )
        self._reset_reference()

    def reset_to_mean(self, values: list[Tensor]) -> None:
        """Set values and reference to the mean, with no residual."""
        super().reset_to_mean(values)
        self._reset_reference()

    def state(self) -> dict[str, Tensor]:
        """Return the reference and the residual, too, padded to equal length in a group."""
        kept = {"reference": self._reference, "residual": self._residual}
        short = self._max_shard_numel - self._shard_numel
        return super().state() | {name: pad(flat, (0, short)) for name, flat in kept.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load reference and residual; without them the current values become the reference.

        The current values are then those of the checkpoint's one model, equal on all ranks.
        """
        super().load(state)
        self._reset_reference()
        for name, into in (("reference", self._reference), ("residual", self._residual)):
            if name in state:
                check_saved_length(name, state[name], self._max_shard_numel)
                into.copy_(state[name][: self._shard_numel])

    def _reset_reference(self) -> None:
        self._copy_shard_into(self._reference)
        self._residual.zero_()

    def _messages(self, peers: RoundPeers) -> list[Tensor]:
        message = self._shard_buffer()
        (difference,) = self._buffer_pool.get_buffers(
            _STEP_LANE, [self._shard_numel], self._reference, "moved"
        )
        self._residual.add_(self._copy_shard_into(difference).sub_(self._reference))
        plain, bound = self._bind_codec(message, _STEP_LANE)
        plain.copy_(self._residual)
        bound.encode()
        self._residual.sub_(plain)  # encode() has rounded `plain` to what the receiver decodes
        return [message]

    def _accumulate(self, gossip_round: GossipRound, change: Tensor) -> None:
        if not gossip_round.received:
            return  # this round has no job on the lane, which may decode for another segment
        flats = [*gossip_round.sent, *gossip_round.received]
        sent, *received = self._buffer_pool.get_buffers(
            self._decode_lane, [self._shard_numel] * len(flats), change, "decoded"
        )
        for into, flat in zip((sent, *received), flats, strict=True):
            plain, bound = self._bind_codec(flat, self._decode_lane)
            bound.decode()
            into.copy_(plain)
        add_weighted_differences_(
            change, sent, received, [edge.weight for edge in gossip_round.peers.receives]
        )

    def _bind_codec(self, message: Tensor, lane: int) -> tuple[Tensor, BoundCodec]:
        """Return the plain buffer of ``message`` and the codec bound to both."""
        (plain,) = self._buffer_pool.get_buffers(lane, [self._shard_numel], self._float32, "place")
        workspace_numel = self._codec.workspace_numel([self._shard_numel], plain.device)
        (work,) = self._buffer_pool.get_buffers(lane, [workspace_numel], self._float32, "work")
        return plain, self._codec.bind(plain, [self._shard_numel], message, work)

"""Mixers: the gossip rounds of one segment, from sending its values to applying received ones.

A round starts when the segment is up to date and finishes some steps later. Every round in flight
has its own send and receive buffers, so buffers in flight are never written to.

Members of a group have equal values, and each exchanges one shard of them with peers. The changes
that follow from received shards are all-gathered in the group before they are applied::

    between groups   | shard 0 | shard 1 | shard 2 |   with peers of the same member index
    inside a group   |        whole change         |   all-gather of the shards' changes

In a group of one rank the shard is the whole segment.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.comm.transport import CompletedWork, Work
from stretto.errors import CheckpointError
from stretto.optim.rules import add_weighted_differences_, merge_push_sum_
from stretto.strategies.gossip.groups import GossipRoute
from stretto.topology import RoundPeers

PeersOfRound = Callable[[int], RoundPeers]
"""Returns this rank's peers in the round of a given number."""
_ROUND_PREFIX = "round-"
"""Prefix of the checkpoint keys of rounds in flight."""


@dataclass(slots=True)
class GossipRound:
    """A round of gossip in flight."""

    peers: RoundPeers
    sent: list[Tensor]
    """Flat messages of this rank's shard: one for all peers, or one for each."""
    received: list[Tensor]
    """Flat messages of the same shard, one from each sender."""
    work: Work = field(default_factory=lambda: CompletedWork(0.0))
    change: Tensor | None = None
    """The whole change that the messages make, if it was computed before `finish_round`."""


class SegmentMixer(ABC):
    """Gossip of the parameters of one segment, which have one type."""

    _NUM_EXTRA = 0
    """Number of elements that are sent behind the values."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        wire: torch.dtype | None,
        peers_of: PeersOfRound,
        route: GossipRoute,
    ) -> None:
        self.values = [parameter.detach() for parameter in parameters]
        self._template = self.values[0].new_empty(0)
        """Empty tensor with the values' type and device; messages may have a narrower type."""
        self._dtype = wire or self._template.dtype
        self._peers_of, self._route = peers_of, route
        self._sizes = [value.numel() for value in self.values]
        self._numel = sum(self._sizes) + self._NUM_EXTRA
        self._extra_ones = self._template.new_ones(self._NUM_EXTRA)
        self._shard = route.shard(self._numel)
        self._shard_numel = self._shard.stop - self._shard.start
        self._wire_numel = self._shard_numel
        """Number of elements of a message."""
        self._shard_slices = _slices_in_shard([*self._sizes, self._NUM_EXTRA], self._shard)
        self._rounds: deque[GossipRound] = deque()
        self._free_buffers: list[Tensor] = []

    mass = 1.0
    """This rank's push-sum mass of the segment; updates apply to values times mass."""

    @property
    def rounds_in_flight(self) -> int:
        """Number of rounds that were started and not finished."""
        return len(self._rounds)

    @torch.no_grad()
    def start_round(self, number: int) -> None:
        """Send the segment's current values to the peers of round ``number``."""
        peers = self._peers_of(number)
        gossip_round = GossipRound(
            peers, self._messages(peers), [self._shard_buffer() for _ in peers.receives]
        )
        is_gathered_in_group = gossip_round.received and self._route.group.width > 1
        on_complete = partial(self._gather_change, gossip_round) if is_gathered_in_group else None
        gossip_round.work = self._route.start(
            peers, gossip_round.sent, gossip_round.received, on_complete
        )
        self._rounds.append(gossip_round)

    @torch.no_grad()
    def finish_round(self) -> None:
        """Wait for the oldest round in flight and apply its change."""
        self._rounds[0].work.wait()
        gossip_round = self._rounds.popleft()
        self._apply(self._round_change(gossip_round))
        self._free_buffers += [*gossip_round.sent, *gossip_round.received]

    def wait(self) -> None:
        """Wait for all messages without applying them."""
        for gossip_round in self._rounds:
            gossip_round.work.wait()

    @torch.no_grad()
    def reset_to_mean(self, values: list[Tensor]) -> None:
        """Set the segment to ``values``, the mean of all ranks, and drop the rounds in flight."""
        torch._foreach_copy_(self.values, values)
        for gossip_round in self._rounds:
            self._free_buffers += [*gossip_round.sent, *gossip_round.received]
        self._rounds.clear()

    @abstractmethod
    def values_to_average(self) -> list[Tensor]:
        """Return new tensors whose mean over ranks is the models' mean; call it after `wait`.

        They include received values that are not applied yet, where these affect the mean.
        """

    @abstractmethod
    def _messages(self, peers: RoundPeers) -> list[Tensor]:
        """Return the messages of this rank's shard: one for all peers, or one for each."""

    @abstractmethod
    def _accumulate(self, gossip_round: GossipRound, change: Tensor) -> None:
        """Add the effect of a round's messages to ``change``, which covers the shard."""

    @abstractmethod
    def _apply(self, change: Tensor) -> None:
        """Apply a whole change to the values."""

    def _round_change(self, gossip_round: GossipRound) -> Tensor:
        """Return the whole flat change that a round's messages make."""
        return (
            self._local_change(gossip_round) if gossip_round.change is None else gossip_round.change
        )

    def _local_change(self, gossip_round: GossipRound) -> Tensor:
        """Return the change of this rank's shard, with zeros outside it."""
        change = self._template.new_zeros(self._numel)
        self._accumulate(gossip_round, change[self._shard])
        return change

    def _gather_change(self, gossip_round: GossipRound) -> None:
        """All-gather the round's change in the group; runs on the lane's thread."""
        change = self._local_change(gossip_round)
        self._route.all_gather_in_group_(change)
        gossip_round.change = change

    def state(self) -> dict[str, Tensor]:
        """Return copies of received changes that are not applied yet; call it after `wait`."""
        rounds = enumerate(self._rounds)
        return {
            f"{_ROUND_PREFIX}{index:03}": self._round_change(gossip_round).clone()
            for index, gossip_round in rounds
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned.

        Raises:
            CheckpointError: The state is of another segment or another kind of gossip.
        """
        device = self.values[0].device
        rounds = [name for name in sorted(state) if name.startswith(_ROUND_PREFIX)]
        for name in rounds:
            check_saved_length("round", state[name], self._numel)
        received = [state[name].to(device, copy=True) for name in rounds]
        no_peers = RoundPeers(1.0)
        self._rounds = deque(GossipRound(no_peers, [], [], change=change) for change in received)

    def _shard_buffer(self) -> Tensor:
        """Return a message buffer for the shard, reused if one is free."""
        if self._free_buffers:
            return self._free_buffers.pop()
        return self._template.new_empty(self._wire_numel, dtype=self._dtype)

    def _copy_shard_into(self, into: Tensor) -> Tensor:
        """Copy the shard's current values into ``into`` and return it."""
        values = self._values_to_send()
        parts = [values[index].reshape(-1)[start:stop] for index, start, stop in self._shard_slices]
        if parts:
            targets = into.split([part.numel() for part in parts])
            torch._foreach_copy_(list(targets), parts)
        return into

    def _values_to_send(self) -> list[Tensor]:
        """Return the whole tensors to send: one for each value, then the extra elements."""
        return [*self.values, self._extra_ones]

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat[: sum(self._sizes)].split(self._sizes)
        return [part.view(value.shape) for part, value in zip(parts, self.values, strict=True)]


class DifferenceMixer(SegmentMixer):
    """Adds weighted differences between received and sent values, which preserves the mean.

    Both ends use the values of the time at which they were sent, however late they arrive.
    """

    def values_to_average(self) -> list[Tensor]:
        """Return copies of the values: rounds in flight do not change the mean."""
        return [value.clone() for value in self.values]

    def _messages(self, peers: RoundPeers) -> list[Tensor]:
        return [self._copy_shard_into(self._shard_buffer())]

    def _accumulate(self, gossip_round: GossipRound, change: Tensor) -> None:
        sent, *received = (
            flat.to(change.dtype) for flat in (*gossip_round.sent, *gossip_round.received)
        )
        add_weighted_differences_(
            change, sent, received, [edge.weight for edge in gossip_round.peers.receives]
        )

    def _apply(self, change: Tensor) -> None:
        torch._foreach_add_(self.values, self._views(change))


class PushSumMixer(SegmentMixer):
    """Push-sum: sends shares of values times mass, and keeps values divided by mass.

    Sending a share of both leaves the quotient as it is. The mass is sent as one element behind the
    values.
    """

    _NUM_EXTRA = 1

    def values_to_average(self) -> list[Tensor]:
        """Return values times mass, plus all received shares."""
        added = [value * self.mass for value in self.values]
        for gossip_round in self._rounds:
            torch._foreach_add_(added, self._views(self._round_change(gossip_round)))
        return added

    def _messages(self, peers: RoundPeers) -> list[Tensor]:
        messages = [
            self._copy_shard_into(self._shard_buffer()).mul_(edge.weight * self.mass)
            for edge in peers.sends
        ]
        self.mass *= peers.self_weight
        return messages

    def _accumulate(self, gossip_round: GossipRound, change: Tensor) -> None:
        for flat in gossip_round.received:
            change += flat

    def _apply(self, change: Tensor) -> None:
        total = self.mass + float(change[-1])
        merge_push_sum_(self.values, self.mass, self._views(change), total)
        self.mass = total

    def reset_to_mean(self, values: list[Tensor]) -> None:
        """Set the values to the mean and the mass to 1."""
        super().reset_to_mean(values)
        self.mass = 1.0

    def state(self) -> dict[str, Tensor]:
        """Return the rounds in flight and the mass."""
        return {"mass": torch.tensor(self.mass, dtype=torch.float64), **super().state()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the rounds in flight and the mass."""
        self.mass = float(state.get("mass", 1.0))
        super().load(state)


def hook_mass(
    optimizer: Optimizer, segments: Sequence[list[nn.Parameter]], mixers: Sequence[SegmentMixer]
) -> list[RemovableHandle]:
    """Make every step of ``optimizer`` update values times mass, as push-sum needs it."""

    @torch.no_grad()
    def scale(power: int) -> None:
        for segment, mixer in zip(segments, mixers, strict=True):
            if mixer.mass != 1.0 and any(p.grad is not None for p in segment):
                torch._foreach_mul_(mixer.values, mixer.mass**power)

    return [
        optimizer.register_step_pre_hook(lambda *_: scale(1)),
        optimizer.register_step_post_hook(lambda *_: scale(-1)),
    ]


def check_saved_length(what: str, tensor: Tensor, numel: int) -> None:
    """Check that a segment's tensor from a checkpoint has ``numel`` elements.

    Raises:
        CheckpointError: The tensor is of another segment or another kind of gossip.
    """
    if tensor.numel() != numel:
        raise CheckpointError(
            f"the checkpoint has a {what} of {tensor.numel()} elements for a segment of {numel}: "
            "set strategy.kind and strategy.segments back to resume, or start a new run under "
            "another name (init.checkpoint takes the weights along)"
        )


def _slices_in_shard(sizes: Sequence[int], shard: slice) -> list[tuple[int, int, int]]:
    """Return (index, start, stop) of the elements in ``shard`` for concatenated tensors."""
    ends = list(accumulate(sizes))
    begins = [end - size for end, size in zip(ends, sizes, strict=True)]
    spans = [
        (index, max(shard.start, begin) - begin, min(shard.stop, end) - begin)
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
    return [(index, start, stop) for index, start, stop in spans if start < stop]

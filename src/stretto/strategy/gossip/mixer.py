"""One segment's gossip: what was said and heard, and when it counts.

A round leaves when the segment is up to date, and arrives some steps later. There is room for what
is sent and for what is heard of every round that is under way: nothing that still travels is
written to.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.comm.channel import Finished, Parcel, Pending
from stretto.optim.combining import pull, take_in_
from stretto.topology import Peers

Carry = Callable[[Sequence[Parcel], Sequence[Parcel]], Pending]
"""Begins an exchange with peers."""
Whom = Callable[[int], Peers]
"""From the number of a round to this rank's peers in it."""


@dataclass(slots=True)
class Round:
    """One round under way."""

    peers: Peers
    sent: list[Tensor]
    """Flat; one for all, or one for each whom it goes to."""
    heard: list[Tensor]
    """Flat, one for each whom it comes from."""
    pending: Pending
    change: Tensor | None = None
    """Flat: what all that comes to, where it is known from a checkpoint."""


class Mixer(ABC):
    """Gossip of the parameters of one segment, which are of one type."""

    _MORE = 0
    """Elements that travel behind the values."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], wire: torch.dtype | None, whom: Whom, carry: Carry
    ) -> None:
        self.values = [parameter.detach() for parameter in parameters]
        self._sizes = [value.numel() for value in self.values]
        self._dtype = wire or self.values[0].dtype
        self._whom, self._carry = whom, carry
        self._rounds: deque[Round] = deque()
        self._rooms: list[Tensor] = []

    mass = 1.0
    """What this rank has of the segment's mass: updates are made on values times it."""

    @property
    def under_way(self) -> int:
        """Rounds that have left and not arrived."""
        return len(self._rounds)

    @torch.no_grad()
    def leave(self, number: int) -> None:
        """Tell this round's peers what the segment is now."""
        peers = self._whom(number)
        sent = self._said(peers)
        heard = [self._room() for _ in peers.receives]
        targets = sent if len(sent) == len(peers.sends) else sent * len(peers.sends)
        sends = [Parcel(edge.rank, one) for edge, one in zip(peers.sends, targets, strict=True)]
        receives = [Parcel(edge.rank, one) for edge, one in zip(peers.receives, heard, strict=True)]
        self._rounds.append(Round(peers, sent, heard, self._carry(sends, receives)))

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for the oldest round under way, and let it count."""
        self._rounds[0].pending.wait()
        one = self._rounds.popleft()
        self._take(self._come_to(one))
        self._rooms += [*one.sent, *one.heard]

    def wait(self) -> None:
        """Wait for all messages; none of them counts by that."""
        for one in self._rounds:
            one.pending.wait()

    @abstractmethod
    def whole(self) -> list[Tensor]:
        """Return new tensors whose mean over ranks is that of the model, once all was waited for.

        What has been heard and does not count yet is in them.
        """

    @abstractmethod
    def _said(self, peers: Peers) -> list[Tensor]:
        """Return what leaves: one for all, or one for each."""

    @abstractmethod
    def _added(self, one: Round) -> Tensor:
        """Return what was heard in a round as one: flat, and of one size, whoever was heard."""

    @abstractmethod
    def _take(self, change: Tensor) -> None:
        """Let what was heard count."""

    def _come_to(self, one: Round) -> Tensor:
        return self._added(one) if one.change is None else one.change

    def state(self) -> dict[str, Tensor]:
        """Return what has been heard and does not count yet, once all was waited for."""
        rounds = enumerate(self._rounds)
        return {f"round-{index:03}": self._come_to(one).clone() for index, one in rounds}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""
        heard = [tensor.clone() for name, tensor in sorted(state.items()) if name != "mass"]
        nobody = Peers(1.0)
        self._rounds = deque(Round(nobody, [], [], Finished(0.0), change) for change in heard)

    def _room(self) -> Tensor:
        return self._rooms.pop() if self._rooms else self._flat()

    def _flat(self) -> Tensor:
        numel = sum(self._sizes) + self._MORE
        return torch.empty(numel, dtype=self._dtype, device=self.values[0].device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat[: sum(self._sizes)].split(self._sizes)
        return [part.view(value.shape) for part, value in zip(parts, self.values, strict=True)]


class Differences(Mixer):
    """Moves by what others had more, or less, when both spoke: the mean stays by itself."""

    def whole(self) -> list[Tensor]:
        """Return the values: whatever is heard changes no mean."""
        return [value.clone() for value in self.values]

    def _said(self, peers: Peers) -> list[Tensor]:
        said = self._room()
        torch._foreach_copy_(self._views(said), self.values)
        return [said]

    def _added(self, one: Round) -> Tensor:
        own = self.values[0].dtype  # what travels may be narrower
        heard = [flat.to(own) for flat in one.heard]
        return pull(one.sent[0].to(own), heard, [edge.weight for edge in one.peers.receives])

    def _take(self, change: Tensor) -> None:
        torch._foreach_add_(self.values, self._views(change))


class Pushes(Mixer):
    """Gives shares of values away, with their mass, and divides by the mass that it has.

    Values are always over mass: to give some of both away changes none of them. A mass is sent as
    one element behind the values.
    """

    _MORE = 1

    def whole(self) -> list[Tensor]:
        """Return values times mass, with what has been heard."""
        added = [value * self.mass for value in self.values]
        for one in self._rounds:
            torch._foreach_add_(added, self._views(self._come_to(one)))
        return added

    def _said(self, peers: Peers) -> list[Tensor]:
        said = []
        for edge in peers.sends:
            share = self._room()
            torch._foreach_copy_(self._views(share), self.values)
            share[-1] = 1.0
            said.append(share.mul_(edge.weight * self.mass))
        self.mass *= peers.own
        return said

    def _added(self, one: Round) -> Tensor:
        added = torch.zeros_like(self._flat())
        for flat in one.heard:
            added += flat
        return added

    def _take(self, change: Tensor) -> None:
        total = self.mass + float(change[-1])
        take_in_(self.values, self.mass, self._views(change), total)
        self.mass = total

    def state(self) -> dict[str, Tensor]:
        """Return the mass, too."""
        return {"mass": torch.tensor(self.mass, dtype=torch.float64), **super().state()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the mass back, too."""
        self.mass = float(state.get("mass", 1.0))
        super().load(state)

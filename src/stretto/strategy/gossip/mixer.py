"""One segment's gossip: what was said and heard, and when it counts.

A round leaves when the segment is up to date, and arrives some steps later. There is room for what
is sent and for what is heard of every round that is under way: nothing that still travels is
written to.

Members of a group have the same values, and each tells and hears a shard of them. What was heard is
added up shard by shard, and put together in the group before it counts::

    between groups   | shard 0 | shard 1 | shard 2 |   each to, and from, who is at the same place
    inside           |  what all that comes to     |   from each member to the others

A group of one has one shard, which is whole as it is.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from stretto.comm.channel import Finished, Pending
from stretto.errors import CheckpointError
from stretto.optim.combining import pull_, take_in_
from stretto.strategy.gossip.route import Route
from stretto.topology import Peers

Whom = Callable[[int], Peers]
"""From the number of a round to this rank's peers in it."""
_ROUND = "round-"
"""Begins the names of what was under way."""


@dataclass(slots=True)
class Round:
    """One round under way."""

    peers: Peers
    sent: list[Tensor]
    """This rank's shard, flat; one for all, or one for each whom it goes to."""
    heard: list[Tensor]
    """Of the same shard, flat, one for each whom it comes from."""
    pending: Pending = field(default_factory=lambda: Finished(0.0))
    change: Tensor | None = None
    """Flat and whole: what all that comes to, where somebody had to know it before it counts."""


class Mixer(ABC):
    """Gossip of the parameters of one segment, which are of one type."""

    _MORE = 0
    """Elements that travel behind the values."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], wire: torch.dtype | None, whom: Whom, route: Route
    ) -> None:
        self.values = [parameter.detach() for parameter in parameters]
        self._like = self.values[0].new_empty(0)
        """Of the type that values have; what travels may be narrower."""
        self._dtype = wire or self._like.dtype
        self._whom, self._route = whom, route
        self._sizes = [value.numel() for value in self.values]
        self._numel = sum(self._sizes) + self._MORE
        self._ones = self._like.new_ones(self._MORE)
        self._shard = route.shard(self._numel)
        self._mine = self._shard.stop - self._shard.start
        self._travels = self._mine
        """Elements of what is sent, and of what is heard."""
        self._pieces = _inside([*self._sizes, self._MORE], self._shard)
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
        one = Round(peers, self._said(peers), [self._room() for _ in peers.receives])
        shared = one.heard and self._route.group.width > 1
        then = partial(self._put_together, one) if shared else None
        one.pending = self._route.start(peers, one.sent, one.heard, then)
        self._rounds.append(one)

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

    @torch.no_grad()
    def begin_again(self, values: list[Tensor]) -> None:
        """Become ``values``, the mean of all; what is under way is in it, and was waited for."""
        torch._foreach_copy_(self.values, values)
        for one in self._rounds:
            self._rooms += [*one.sent, *one.heard]
        self._rounds.clear()

    @abstractmethod
    def whole(self) -> list[Tensor]:
        """Return new tensors whose mean over ranks is that of the model, once all was waited for.

        What has been heard and does not count yet is in them.
        """

    @abstractmethod
    def _said(self, peers: Peers) -> list[Tensor]:
        """Return what leaves of this rank's shard: one for all, or one for each."""

    @abstractmethod
    def _add_up(self, one: Round, change: Tensor) -> None:
        """Add what was heard in a round to ``change``, which is of the shard."""

    @abstractmethod
    def _take(self, change: Tensor) -> None:
        """Let what was heard count."""

    def _come_to(self, one: Round) -> Tensor:
        """Return what was heard in a round as one: flat, whole, of one size, whoever was heard."""
        return self._heard_here(one) if one.change is None else one.change

    def _heard_here(self, one: Round) -> Tensor:
        """Return the same as far as this rank has heard it: zeros beside its shard."""
        change = self._like.new_zeros(self._numel)
        self._add_up(one, change[self._shard])
        return change

    def _put_together(self, one: Round) -> None:
        """Let the group have what each of its members heard; on the thread of the messages."""
        change = self._heard_here(one)
        self._route.gather_(change)
        one.change = change

    def state(self) -> dict[str, Tensor]:
        """Return what has been heard and does not count yet, once all was waited for."""
        rounds = enumerate(self._rounds)
        return {f"{_ROUND}{index:03}": self._come_to(one).clone() for index, one in rounds}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take it back.

        Raises:
            CheckpointError: It is of another segment, or of another way to mix.
        """
        home = self.values[0].device
        rounds = [name for name in sorted(state) if name.startswith(_ROUND)]
        for name in rounds:
            check_kept("round", state[name], self._numel)
        heard = [state[name].to(home, copy=True) for name in rounds]
        nobody = Peers(1.0)
        self._rounds = deque(Round(nobody, [], [], change=change) for change in heard)

    def _room(self) -> Tensor:
        """Return room for the shard, as it travels."""
        if self._rooms:
            return self._rooms.pop()
        return self._like.new_empty(self._travels, dtype=self._dtype)

    def _written(self, into: Tensor) -> Tensor:
        """Return ``into`` with the shard's values as they are now."""
        told = self._told()
        pieces = [told[index].reshape(-1)[start:stop] for index, start, stop in self._pieces]
        if pieces:
            places = into.split([piece.numel() for piece in pieces])
            torch._foreach_copy_(list(places), pieces)
        return into

    def _told(self) -> list[Tensor]:
        """Return what there is to tell, whole: a tensor for each value, and what is behind them."""
        return [*self.values, self._ones]

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat[: sum(self._sizes)].split(self._sizes)
        return [part.view(value.shape) for part, value in zip(parts, self.values, strict=True)]


class Differences(Mixer):
    """Moves by what others had more, or less, when both spoke: the mean stays by itself."""

    def whole(self) -> list[Tensor]:
        """Return the values: whatever is heard changes no mean."""
        return [value.clone() for value in self.values]

    def _said(self, peers: Peers) -> list[Tensor]:
        return [self._written(self._room())]

    def _add_up(self, one: Round, change: Tensor) -> None:
        sent, *heard = (flat.to(change.dtype) for flat in (*one.sent, *one.heard))
        pull_(change, sent, heard, [edge.weight for edge in one.peers.receives])

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
        said = [self._written(self._room()).mul_(edge.weight * self.mass) for edge in peers.sends]
        self.mass *= peers.own
        return said

    def _add_up(self, one: Round, change: Tensor) -> None:
        for flat in one.heard:
            change += flat

    def _take(self, change: Tensor) -> None:
        total = self.mass + float(change[-1])
        take_in_(self.values, self.mass, self._views(change), total)
        self.mass = total

    def begin_again(self, values: list[Tensor]) -> None:
        """Begin again with a mass of 1."""
        super().begin_again(values)
        self.mass = 1.0

    def state(self) -> dict[str, Tensor]:
        """Return the mass, too."""
        return {"mass": torch.tensor(self.mass, dtype=torch.float64), **super().state()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the mass back, too."""
        self.mass = float(state.get("mass", 1.0))
        super().load(state)


def check_kept(what: str, tensor: Tensor, numel: int) -> None:
    """Check that what a checkpoint has of a segment is as long as this run's.

    Raises:
        CheckpointError: It is of another segment, or of another way to mix.
    """
    if tensor.numel() != numel:
        raise CheckpointError(
            f"the checkpoint has a {what} of {tensor.numel()} elements for a segment of {numel}: "
            "set strategy.kind and strategy.segments back to resume, or start a new run under "
            "another name (init.checkpoint takes the weights along)"
        )


def _inside(sizes: Sequence[int], shard: slice) -> list[tuple[int, int, int]]:
    """Return which elements of which tensors, laid one behind the other, are in a shard."""
    ends = list(accumulate(sizes))
    begins = [end - size for end, size in zip(ends, sizes, strict=True)]
    spans = [
        (index, max(shard.start, begin) - begin, min(shard.stop, end) - begin)
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
    return [(index, start, stop) for index, start, stop in spans if start < stop]

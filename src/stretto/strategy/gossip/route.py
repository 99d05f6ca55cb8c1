"""The way of one segment's messages: its shard to and from peers, then to the rest of the group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stretto.comm.channel import Channel, Parcel, Pending
from stretto.comm.post import Post
from stretto.strategy.gossip.group import Group
from stretto.topology import Peers


@dataclass(frozen=True, slots=True)
class Route:
    """One lane, for peers and for members of a rank's own group: no rank is both.

    So messages, which keep their order between two ranks, are never taken for each other.
    """

    group: Group
    channel: Channel
    post: Post
    lane: int

    def shard(self, numel: int) -> slice:
        """Return what this rank tells, and hears, of so many elements."""
        return self.group.shards(numel)[self.group.place]

    def start(
        self,
        peers: Peers,
        sent: Sequence[Tensor],
        heard: Sequence[Tensor],
        then: Callable[[], None] | None,
    ) -> Pending:
        """Begin a round with peers; ``then`` is called when all was heard, before the next one.

        What is ``sent`` is one for all peers, or one for each.
        """
        told, others = ([edge.rank for edge in edges] for edges in (peers.sends, peers.receives))
        each = sent if len(sent) == len(told) else [*sent] * len(told)
        sends, receives = self._parcels(told, each), self._parcels(others, heard)
        return self.post.start(sends, receives, self.lane, then)

    def gather_(self, flat: Tensor) -> None:
        """Make ``flat``, of which this rank has its shard, whole; all members of a group together.

        One message to each of the others: as many bytes as around a ring, in one round.
        """
        shards = [flat[shard] for shard in self.group.shards(flat.numel())]
        place, ranks = self.group.place, [*self.group.members]
        mine, theirs = shards.pop(place), shards
        del ranks[place]
        self.channel.exchange(
            self._parcels(ranks, [mine] * len(ranks)), self._parcels(ranks, theirs)
        )

    def _parcels(self, ranks: Sequence[int], tensors: Sequence[Tensor]) -> list[Parcel]:
        # Short segments leave some shards empty; both ends compute the same and skip them.
        pairs = zip(ranks, tensors, strict=True)
        return [Parcel(rank, tensor, self.lane) for rank, tensor in pairs if tensor.numel()]

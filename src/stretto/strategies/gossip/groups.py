"""Groups of neighbouring ranks that share one model, and the routes of their messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stretto.cluster.world import Mesh
from stretto.collectives.schedule import chunk_bounds
from stretto.comm.p2p_executor import P2PExecutor
from stretto.comm.transport import P2POp, Transport, Work
from stretto.errors import ConfigError
from stretto.topology import RoundPeers, Topology, grouped
from stretto.topology.round_peers import possible_group_counts, ranks_of_group, shift_edges

HOSTS = "hosts"
"""Value of ``strategy.groups`` that makes one group per host."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The group of ``rank`` among ``count`` groups of ``width`` ranks."""

    count: int
    width: int
    rank: int

    @property
    def index(self) -> int:
        """Index of the rank's group."""
        return self.rank // self.width

    @property
    def member_index(self) -> int:
        """Index of the rank in its group."""
        return self.rank % self.width

    @property
    def members(self) -> range:
        """The ranks of the group."""
        return ranks_of_group(self.index, self.width)

    def peers(self, topology: Topology, number: int, segment: int) -> RoundPeers:
        """Return the peers of a round: members of the peer groups with the same member index."""
        peers = topology(self.index, self.count, number, segment)
        return RoundPeers(
            peers.self_weight,
            shift_edges(peers.sends, self.member_index, self.width),
            shift_edges(peers.receives, self.member_index, self.width),
        )

    def shards(self, numel: int) -> list[slice]:
        """Return the slice of a flat tensor that each member exchanges with peers, in order."""
        bounds = chunk_bounds(numel, self.width)
        return [slice(bounds[index], bounds[index + 1]) for index in range(self.width)]


def num_groups(groups: int | str | None, mesh: Mesh) -> int:
    """Return the number of groups that ``strategy.groups`` means on ``mesh``.

    Raises:
        ConfigError: Each host should be a group, but hosts differ in their number of ranks.
    """
    if groups is None:
        return mesh.size
    if groups == HOSTS and len(set(mesh.ranks_per_host)) != 1:
        raise ConfigError(
            f"strategy.groups = 'hosts': hosts have {', '.join(map(str, mesh.ranks_per_host))} "
            f"ranks, and groups are of equal size: {mesh.size} ranks can be "
            f"{possible_group_counts(mesh.size)} groups"
        )
    return mesh.hosts if groups == HOSTS else int(groups)


def group_of(rank: int, mesh: Mesh, groups: int | str | None, topology: Topology) -> RankGroup:
    """Return the group of ``rank``, checked for ``topology`` between the groups.

    Raises:
        ConfigError: The ranks cannot form so many equal groups, or ``topology`` does not support
            that number of groups.
    """
    count = num_groups(groups, mesh)
    if groups is None:
        topology.check(count)
    elif reason := grouped(topology, count).size_error(mesh.size):
        raise ConfigError(
            f"strategy.groups = {groups!r}, strategy.topology = {topology.name!r}: {reason}"
        )
    return RankGroup(count, mesh.size // count, rank)


@dataclass(frozen=True, slots=True)
class GossipRoute:
    """Sends one segment's messages: its shard to and from peers, then inside the group.

    Both use one lane. No rank is a peer and a member of the same group, and messages between two
    ranks keep their order, so messages are never confused.
    """

    group: RankGroup
    transport: Transport
    p2p_executor: P2PExecutor
    lane: int

    def shard(self, numel: int) -> slice:
        """Return the slice of ``numel`` elements that this rank exchanges with peers."""
        return self.group.shards(numel)[self.group.member_index]

    def start(
        self,
        peers: RoundPeers,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        on_complete: Callable[[], None] | None,
    ) -> Work:
        """Start a round with peers.

        Args:
            peers: The peers of the round.
            sent: One message for all peers, or one for each.
            received: Buffers of the received messages, one for each sender.
            on_complete: Called on the lane's thread when all messages have arrived, before the
                lane's next round.
        """
        destinations, sources = (
            [edge.rank for edge in edges] for edges in (peers.sends, peers.receives)
        )
        tensors_to_send = sent if len(sent) == len(destinations) else [*sent] * len(destinations)
        sends, receives = (
            self._p2p_ops(destinations, tensors_to_send),
            self._p2p_ops(sources, received),
        )
        return self.p2p_executor.start(sends, receives, self.lane, on_complete)

    def all_gather_in_group_(self, flat: Tensor) -> None:
        """All-gather ``flat``, of which each member holds its shard (collective in the group).

        Each member sends its shard directly to the others: as many bytes as a ring, in one round.
        """
        shards = [flat[shard] for shard in self.group.shards(flat.numel())]
        member_index, ranks = self.group.member_index, [*self.group.members]
        own_shard, other_shards = shards.pop(member_index), shards
        del ranks[member_index]
        self.transport.exchange(
            self._p2p_ops(ranks, [own_shard] * len(ranks)), self._p2p_ops(ranks, other_shards)
        )

    def _p2p_ops(self, ranks: Sequence[int], tensors: Sequence[Tensor]) -> list[P2POp]:
        # Shards of short segments may be empty. Both ends compute the same shards and skip these.
        pairs = zip(ranks, tensors, strict=True)
        return [P2POp(rank, tensor, self.lane) for rank, tensor in pairs if tensor.numel()]

"""Groups of ranks in a row, each of which has one model: who is in mine, and whom it meets."""

from dataclasses import dataclass

from stretto.cluster.world import Mesh
from stretto.comm.schedule import chunk_bounds
from stretto.errors import ConfigError
from stretto.topology import Peers, Topology, grouped
from stretto.topology.grouped import members, possible_groups
from stretto.topology.mixing import shifted

HOSTS = "hosts"
"""The ranks of each host are a group."""


@dataclass(frozen=True, slots=True)
class Group:
    """One rank's place among ``count`` groups of ``width`` ranks."""

    count: int
    width: int
    rank: int

    @property
    def index(self) -> int:
        """Which group it is in."""
        return self.rank // self.width

    @property
    def place(self) -> int:
        """Its place in that group."""
        return self.rank % self.width

    @property
    def members(self) -> range:
        """The ranks of the group."""
        return members(self.index, self.width)

    def peers(self, between: Topology, number: int, segment: int) -> Peers:
        """Return whom it tells and hears in a round: those at its place in its group's peers."""
        peers = between(self.index, self.count, number, segment)
        return Peers(
            peers.own,
            shifted(peers.sends, self.place, self.width),
            shifted(peers.receives, self.place, self.width),
        )

    def shards(self, numel: int) -> list[slice]:
        """Return what of a flat tensor each member tells and hears for all, in their order."""
        bounds = chunk_bounds(numel, self.width)
        return [slice(bounds[place], bounds[place + 1]) for place in range(self.width)]


def num_groups(groups: int | str | None, mesh: Mesh) -> int:
    """Return how many groups ``strategy.groups`` means on ``mesh``.

    Raises:
        ConfigError: Each host is to be one, and they differ in ranks.
    """
    if groups is None:
        return mesh.size
    if groups == HOSTS and len(set(mesh.ranks_per_host)) != 1:
        raise ConfigError(
            f"strategy.groups = 'hosts': hosts have {', '.join(map(str, mesh.ranks_per_host))} "
            f"ranks, and groups are of equal size: {mesh.size} ranks can be "
            f"{possible_groups(mesh.size)} groups"
        )
    return mesh.hosts if groups == HOSTS else int(groups)


def group_of(rank: int, mesh: Mesh, groups: int | str | None, between: Topology) -> Group:
    """Return the group of ``rank`` where groups talk to each other as ``between`` says.

    Raises:
        ConfigError: Ranks cannot be so many groups, or these cannot talk so.
    """
    count = num_groups(groups, mesh)
    if groups is None:
        between.check(count)
    elif reason := grouped(between, count).refuses(mesh.size):
        raise ConfigError(
            f"strategy.groups = {groups!r}, strategy.topology = {between.name!r}: {reason}"
        )
    return Group(count, mesh.size // count, rank)

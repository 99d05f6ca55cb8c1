"""`World`: one rank's view of its job: rank, mesh of hosts, store address, launcher."""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Mesh:
    """Hosts by local ranks; ranks are numbered host after host."""

    ranks_per_host: tuple[int, ...]
    _first_ranks: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Each host's first rank, then the number of ranks. Computed once, since it is read often."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_first_ranks", tuple(accumulate(self.ranks_per_host, initial=0)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._first_ranks[-1]

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.ranks_per_host)

    @property
    def shape(self) -> str:
        """Return hosts by ranks as people write it: ``2x4``, or ``3+2`` where hosts differ."""
        even = len(set(self.ranks_per_host)) == 1
        parts = (str(ranks) for ranks in self.ranks_per_host)
        return f"{self.hosts}x{self.ranks_per_host[0]}" if even else "+".join(parts)

    def ranks_on_host(self, host: int) -> range:
        """Return the ranks of one host."""
        return range(self._first_ranks[host], self._first_ranks[host + 1])

    def host_of(self, rank: int) -> int:
        """Return the index of the host that runs ``rank``."""
        return bisect_right(self._first_ranks, rank) - 1


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store listens, and whether rank 0 or the launcher starts it."""

    host: str
    port: int
    started_by_rank_0: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view of a job, the same for every launcher; made by `stretto.cluster.detect`."""

    rank: int
    mesh: Mesh
    """First a guess from the launcher's variables; the rendezvous replaces it by the real mesh."""
    store_address: StoreAddress | None = None
    """None when this process is the only rank."""
    interface: str | None = None
    """Network interface for messages between ranks; None: the one that leads to the store."""
    threads: int = 1
    """CPU threads for this rank: its share of the host's cores, unless set otherwise."""
    link_bits_per_s: int | None = None
    """Rate of each host's network link; None where the launcher does not know it."""
    generation: int = 0
    """Number of restarts by the launcher. It separates the store keys of each start."""
    launcher: str = "none"
    detected_from: str = "no launcher's variables are set"
    """The variables by which the launcher was found, as text for the user."""
    host_name: str = ""
    """The launcher's name for this host; all ranks of a host have the same name."""
    job: str = ""
    """The launcher's name for this job, equal on all its ranks; empty where it has none."""
    restart_command: tuple[str, ...] = ()
    """Command that asks the launcher to restart the job; empty where the user has to."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh.size

    @property
    def host(self) -> int:
        """Index of this rank's host."""
        return self.mesh.host_of(self.rank)

    @property
    def local_rank(self) -> int:
        """Index of this rank among the ranks of its host."""
        return self.rank - self.mesh.ranks_on_host(self.host).start

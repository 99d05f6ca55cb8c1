"""Who am I, how many are we, and where do we meet."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """Hosts by local ranks; ranks are numbered host after host."""

    ranks_per_host: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(self.ranks_per_host)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.ranks_per_host)

    def on_host(self, host: int) -> range:
        """Return the ranks of one host."""
        first = sum(self.ranks_per_host[:host])
        return range(first, first + self.ranks_per_host[host])

    def host_of(self, rank: int) -> int:
        """Return the host a rank lives on."""
        return next(host for host in range(self.hosts) if rank in self.on_host(host))


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the store listens, and whether it is for rank 0 to hold it."""

    host: str
    port: int
    held_by_rank_0: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view of a job, however it was started; made by `stretto.cluster.detect`."""

    rank: int
    mesh: Mesh
    meeting: Meeting | None = None
    """None when this process is the whole world."""
    interface: str | None = None
    """Network interface to talk over; loopback when None."""
    threads: int = 1
    """CPU threads that are this rank's fair share."""
    link_bits_per_s: int | None = None
    """Rate of a host's link, where the launcher knows it."""
    generation: int = 0
    """Grows with each restart by the launcher; groups of different generations never meet."""
    launcher: str = "none"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh.size

    @property
    def host(self) -> int:
        """My host's index."""
        return self.mesh.host_of(self.rank)

    @property
    def local_rank(self) -> int:
        """My place on my host."""
        return self.rank - self.mesh.on_host(self.host).start

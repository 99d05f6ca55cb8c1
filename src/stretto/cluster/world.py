"""Who am I, how many are we, where do we meet, and how does our launcher start us again."""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Mesh:
    """Hosts by local ranks; ranks are numbered host after host."""

    ranks_per_host: tuple[int, ...]
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Each host's first rank, and the number of ranks; kept, since every rank's program asks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", tuple(accumulate(self.ranks_per_host, initial=0)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._starts[-1]

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

    def on_host(self, host: int) -> range:
        """Return the ranks of one host."""
        return range(self._starts[host], self._starts[host + 1])

    def host_of(self, rank: int) -> int:
        """Return the host a rank lives on."""
        return bisect_right(self._starts, rank) - 1


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the store listens, and whether it is for rank 0 to start it."""

    host: str
    port: int
    held_by_rank_0: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """One rank's view of a job, however it was started; made by `stretto.cluster.detect`."""

    rank: int
    mesh: Mesh
    """As far as the launcher told; `stretto.cluster.meet` learns the rest from the others."""
    meeting: Meeting | None = None
    """None when this process is the whole world."""
    interface: str | None = None
    """Network interface to talk over; the one towards the meeting when None."""
    threads: int = 1
    """CPU threads that are this rank's fair share."""
    link_bits_per_s: int | None = None
    """Rate of a host's link, where the launcher knows it."""
    generation: int = 0
    """How often the launcher has started us again; groups of different generations never meet."""
    launcher: str = "none"
    found_by: str = "no launcher's variables are set"
    """Which variables showed the launcher, for a person who wonders."""
    host_name: str = ""
    """What the launcher calls this host; ranks of one host give the same name."""
    job: str = ""
    """What the launcher calls this job, where it has a name: equal on all its ranks."""
    ask_restart: tuple[str, ...] = ()
    """Command that asks the launcher to start the job again; empty where a person has to."""

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

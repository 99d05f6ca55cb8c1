"""Records of the doctor: facts that ranks exchange as JSON, and the findings of checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stretto.cluster.rendezvous import RankInfo

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, printed as one line."""

    check: str
    status: Status
    ranks: tuple[int, ...]
    """The ranks that the finding is about; empty if it is about all."""
    finding: str
    advice: str = ""
    """What to do; never empty if the status is FAIL."""


@dataclass(frozen=True, slots=True)
class RunRequirements:
    """What the run needs of the machines."""

    folder: str
    """The folder that the run writes to."""
    required_bytes: int
    """Disk space needed there on the host of rank 0, which writes the checkpoints."""
    required_for: str
    """What needs the space, as in ``"3 checkpoints"``."""
    heartbeat_timeout_s: float
    timeout_s: float
    threads: int | None = None
    decoders: int = 0
    """Number of decoder processes of each rank."""


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """A rank's identity according to its launcher, and its host."""

    rank_info: RankInfo
    host: str
    machine_id: str
    """Boot id, equal for ranks on one running kernel."""
    pid: int
    detected_by: str
    """The launcher that was detected, and the variables that showed it."""
    store_address: str
    """Host and port of the store; empty for a single rank."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and limits of a rank's machine."""

    cores: tuple[int, ...]
    threads: int
    memory_bytes: int
    gpus: tuple[str, ...]
    shm_bytes: int | None
    """Free shared memory; None without /dev/shm."""
    files_soft: int
    files_hard: int
    kill_wait_s: float | None = None
    """Seconds that Slurm waits between TERM and KILL; None without Slurm."""


@dataclass(frozen=True, slots=True)
class Code:
    """Versions and source files that a rank runs."""

    versions: Mapping[str, str]
    files: Mapping[str, str]
    """Digest of each source file of the package, by its path."""
    backends: tuple[str, ...]
    cuda: str
    """The CUDA version that torch was built for; empty for none."""


@dataclass(frozen=True, slots=True)
class Network:
    """The network interface and ports of a rank."""

    requested_interface: str
    """Value of STRETTO_INTERFACE or GLOO_SOCKET_IFNAME; empty if neither is set."""
    interface_names: tuple[str, ...]
    requested_is_up: bool
    requested_address: str
    """Address of the requested interface; empty if it has none or does not exist."""
    route_interface: str
    """The interface of the kernel's route to the store; empty without a route."""
    address: str
    """The address that this rank listens on; empty without any."""
    ports_low: int
    ports_high: int
    ports_used: int


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder that the run writes to, with the result of a test write."""

    path: str
    free_bytes: int
    free_inodes: int | None
    """None if the file system does not count inodes."""
    error: str = ""
    """Error of the test write; empty if it succeeded."""
    is_full: bool = False
    """Whether the test write failed for lack of space."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts that a rank collects about itself."""

    identity: RankIdentity
    machine: Machine
    code: Code
    network: Network
    folder: Folder


@dataclass(frozen=True, slots=True)
class ProbeEndpoint:
    """The address on which a rank answers probes, and the token of this world."""

    address: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One attempt to reach a peer; ``failure`` is empty when the peer answered."""

    peer: int
    address: str
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far this rank's wall clock is ahead of the coordinator's, with its uncertainty."""

    ahead_s: float
    uncertainty_s: float


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Results of a rank's probes, and its clock offset."""

    probes: tuple[ProbeResult, ...]
    clock: ClockOffset | None = None
    """None on the coordinator, or if the coordinator's clock could not be read."""


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that the coordinator has collected; the input of every check."""

    requirements: RunRequirements
    size: int
    coordinator: int
    facts: Mapping[int, Facts]
    """Facts of every present rank whose facts could be parsed."""
    probe_reports: Mapping[int, ProbeReport] = field(default_factory=dict)
    present_ranks: tuple[int, ...] = ()
    duplicate_ranks: Mapping[int, str] = field(default_factory=dict)
    """Ranks that a second process claimed, with that process's host and pid."""
    rendezvous_error: str = ""
    """Why the rendezvous failed, and after "; " what to do; empty if it succeeded."""

    @property
    def coordinator_facts(self) -> Facts:
        """Facts of the coordinator itself."""
        return self.facts[self.coordinator]

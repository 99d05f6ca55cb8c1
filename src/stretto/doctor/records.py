"""What ranks tell one another, and what is made of it: frozen records that travel as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stretto.cluster.meet import Card

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check says, in one line."""

    check: str
    status: Status
    ranks: tuple[int, ...]
    """The ranks it is about; none where it is about all."""
    finding: str
    advice: str = ""
    """What to do; never empty where the status is FAIL."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """What the run will ask of the machines."""

    folder: str
    """Where it writes."""
    need_bytes: int
    """Room it needs there, on the host of rank 0, which writes the checkpoints."""
    need: str
    """What that room is for, as in ``"3 checkpoints"``."""
    silence_s: float
    timeout_s: float
    threads: int | None = None
    decoders: int = 0
    """Helper processes of each rank."""


@dataclass(frozen=True, slots=True)
class Place:
    """Who a rank is, according to its launcher, and where it finds itself."""

    card: Card
    host: str
    machine_id: str
    """The same for ranks on one running kernel."""
    pid: int
    why: str
    """Which launcher was found, and what in the environment showed it."""
    meeting: str
    """Host and port of the store; empty for a rank alone."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the rank may use."""

    cores: tuple[int, ...]
    threads: int
    memory_bytes: int
    gpus: tuple[str, ...]
    shm_bytes: int | None
    """Free shared memory; None where there is no /dev/shm."""
    files_soft: int
    files_hard: int
    kill_wait_s: float | None = None
    """What Slurm leaves between TERM and KILL; None elsewhere."""


@dataclass(frozen=True, slots=True)
class Code:
    """What the rank runs."""

    versions: Mapping[str, str]
    files: Mapping[str, str]
    """Digest of each source file of the package, by its path."""
    backends: tuple[str, ...]
    cuda: str
    """The CUDA that torch was built for; empty for none."""


@dataclass(frozen=True, slots=True)
class Network:
    """The interface the rank talks over."""

    asked: str
    """What STRETTO_INTERFACE or GLOO_SOCKET_IFNAME names; empty when neither is set."""
    known: tuple[str, ...]
    asked_is_up: bool
    asked_address: str
    """Empty when it has none, or does not exist."""
    towards: str
    """The interface that the kernel takes to the meeting point; empty when there is no way."""
    address: str
    """Where this rank listens; empty when it has no address at all."""
    ports_low: int
    ports_high: int
    ports_used: int


@dataclass(frozen=True, slots=True)
class Folder:
    """The place where the run writes, tried by writing."""

    path: str
    free_bytes: int
    free_inodes: int | None
    """None where the file system does not count them."""
    error: str = ""
    """What writing a file there failed with."""
    is_full: bool = False
    """Whether that was for lack of room."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a rank knows of itself."""

    place: Place
    machine: Machine
    code: Code
    network: Network
    folder: Folder


@dataclass(frozen=True, slots=True)
class Door:
    """Where a rank awaits its visitors, and the word that shows they are of this world."""

    address: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class Visit:
    """One attempt to reach a peer; ``failure`` is empty when the peer answered."""

    peer: int
    address: str
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Clock:
    """How far this rank's wall clock is ahead of the speaker's, give or take."""

    ahead_s: float
    uncertainty_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """What a rank found on its round of visits."""

    visits: tuple[Visit, ...]
    clock: Clock | None = None
    """None for the speaker, and where its clock could not be read."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What the speaker knows when time is up; the input of every check."""

    purpose: Purpose
    size: int
    speaker: int
    facts: Mapping[int, Facts]
    """Of every rank that came to the roll call and could be understood."""
    rounds: Mapping[int, Round] = field(default_factory=dict)
    came: tuple[int, ...] = ()
    doubles: Mapping[int, str] = field(default_factory=dict)
    """Ranks that a second process claimed, and where that one runs."""
    trouble: str = ""
    """Why the speaker could not meet the others, or not to the end, and what to do."""

    @property
    def own(self) -> Facts:
        """What the speaker knows of itself."""
        return self.facts[self.speaker]

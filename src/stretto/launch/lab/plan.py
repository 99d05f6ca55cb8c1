"""What a lab consists of, as values: names, addresses, and the exact commands that build it.

Every host, the head (which holds the store) and the switch (which holds the bridge) is a network
namespace, and each link is made from inside the switch straight into its host: nothing ever appears
among the machine's own interfaces, no address is the machine's own, no namespace has a default
route. So labs cannot meet, all use the same addresses, and a namespace's name tells whose it is.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from stretto.errors import ConfigError

MAX_HOSTS = 16
MAX_RANKS = 64
MIN_BITS_PER_S = 1000

HEAD: Final = "head"
Place = int | Literal["head"]
"""A host by its index, or the head."""

Command = tuple[str, ...]

_NAMESPACE = re.compile(r"stretto-([0-9a-f]{6})-(?:switch|head|h[0-9]+)")
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
_SET_CONGESTION = f"echo cubic 2>/dev/null > {_CONGESTION} || echo reno > {_CONGESTION}"
"""What TCP does when a link is full, whatever the machine's own choice: what most kernels do, or,
where that is not among what the machine allows its namespaces, what all have. BBR stands still for
200 ms every ten seconds, on each connection by itself."""
_PACKETS = 1_000_000
"""Loss is expressed as so many packets of this many."""


@dataclass(frozen=True, slots=True)
class LabSpec:
    """The cluster somebody asked for; each link carries ``bits_per_s`` in each direction."""

    hosts: int
    ranks_per_host: int = 1
    bits_per_s: int | None = None
    """None leaves the links as fast as the machine is."""
    loss: float = 0.0
    """Share of packets that each host drops on arrival."""

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise ConfigError(f"a lab has 1 to {MAX_HOSTS} hosts, got {self.hosts}")
        if self.ranks_per_host < 1 or self.ranks > MAX_RANKS:
            raise ConfigError(
                f"a lab has at least 1 rank per host and at most {MAX_RANKS} in all, got "
                f"{self.hosts} hosts x {self.ranks_per_host} ranks"
            )
        if self.bits_per_s is not None and self.bits_per_s < MIN_BITS_PER_S:
            raise ConfigError(
                f"a lab's rate is at least {MIN_BITS_PER_S} bit/s, got {self.bits_per_s}; "
                'write it with its unit, as in "400mbit"'
            )
        if not 0 <= self.loss < 1:
            raise ConfigError(f"a lab's loss is a share from 0 to below 1, got {self.loss}")

    @property
    def ranks(self) -> int:
        """Return the number of ranks on all hosts together."""
        return self.hosts * self.ranks_per_host

    @property
    def places(self) -> tuple[Place, ...]:
        """Return the hosts in order, then the head: everything that has a link."""
        return (*range(self.hosts), HEAD)


@dataclass(frozen=True, slots=True)
class LabNames:
    """The names of one lab's parts; all carry its id of six hexadecimal digits."""

    lab_id: str

    @property
    def switch(self) -> str:
        """Return the namespace that holds the bridge."""
        return f"stretto-{self.lab_id}-switch"

    @property
    def bridge(self) -> str:
        """Return the bridge that joins all links."""
        return f"stb-{self.lab_id}"

    @property
    def link(self) -> str:
        """Return what a host or the head calls its end of its link."""
        return f"ste-{self.lab_id}"

    def namespace(self, place: Place) -> str:
        """Return the namespace that is this host, or the head."""
        return f"stretto-{self.lab_id}-{place if place == HEAD else f'h{place}'}"

    def port(self, place: Place) -> str:
        """Return what the switch calls its end of the link to ``place``."""
        return f"stp-{self.lab_id}-{place}"


def address(place: Place) -> str:
    """Return the address of a host or the head, from the range reserved for benchmarks."""
    return "198.18.0.1" if place == HEAD else f"198.18.0.{10 + int(place)}"


def lab_of(namespace: str) -> str | None:
    """Return the id of the lab that a namespace belongs to, None if it is not ours."""
    match = _NAMESPACE.fullmatch(namespace)
    return match.group(1) if match else None


def host_of(spec: LabSpec, rank: int) -> int:
    """Return the host of a rank; ranks fill one host after another."""
    return rank // spec.ranks_per_host


def build_commands(spec: LabSpec, lab_id: str) -> tuple[Command, ...]:
    """Return the commands that build the lab, in order; run as root, they all succeed."""
    names = LabNames(lab_id)
    switch = ("ip", "-n", names.switch)
    commands: list[Command] = [
        ("ip", "netns", "add", names.switch),
        (*switch, "link", "add", names.bridge, "type", "bridge"),
        (*switch, "link", "set", names.bridge, "up"),
    ]
    for place in spec.places:
        commands += _attach(names, place)
        if spec.bits_per_s is not None:
            commands += _shape(names, place, spec.bits_per_s)
        if spec.loss:
            commands += _lose(names, place, spec.loss)
    return tuple(commands)


def _attach(names: LabNames, place: Place) -> Iterator[Command]:
    inside, port = names.namespace(place), names.port(place)
    switch, host = ("ip", "-n", names.switch), ("ip", "-n", inside)
    ends = (port, "type", "veth", "peer", "name", names.link, "netns", inside)
    yield ("ip", "netns", "add", inside)
    yield (*switch, "link", "add", *ends)
    yield (*switch, "link", "set", port, "master", names.bridge, "up")
    yield (*host, "addr", "add", f"{address(place)}/24", "dev", names.link)
    yield (*host, "link", "set", "lo", "up")
    yield (*host, "link", "set", names.link, "up")
    yield ("ip", "netns", "exec", inside, "sh", "-c", _SET_CONGESTION)


def _shape(names: LabNames, place: Place, bits_per_s: int) -> Iterator[Command]:
    """Shape both ends: what leaves the host, and what reaches it."""
    bucket = ("root", "tbf", "rate", f"{bits_per_s}bit", "burst", "128kb", "latency", "100ms")
    yield ("tc", "-n", names.namespace(place), "qdisc", "add", "dev", names.link, *bucket)
    yield ("tc", "-n", names.switch, "qdisc", "add", "dev", names.port(place), *bucket)


def _lose(names: LabNames, place: Place, loss: float) -> Iterator[Command]:
    inside = names.namespace(place)
    # Else a "packet" is up to 64 KB of segments, and losing one is losing 44 in a row.
    yield ("ip", "-n", inside, "link", "set", names.link, "gso_max_segs", "1")
    if place == HEAD:
        return
    dropped = f"numgen random mod {_PACKETS} < {max(1, round(loss * _PACKETS))} drop"
    rules = (
        "add table inet stretto",
        "add chain inet stretto arriving { type filter hook input priority 0; }",
        f'add rule inet stretto arriving iifname "{names.link}" {dropped}',
    )
    yield ("ip", "netns", "exec", inside, "nft", "; ".join(rules))

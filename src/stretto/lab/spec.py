"""Definition of a lab: names, addresses, and the exact commands that build it.

Every host, the head (which runs the store) and the switch (which holds the bridge) is a network
namespace. Each link is created inside the switch with its other end directly in the host. Nothing
ever appears among the machine's own interfaces, no address is the machine's own, and no namespace
has a default route. Labs are therefore isolated from each other and can all use the same addresses.
The name of a namespace contains the id of its lab.
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
LabNode = int | Literal["head"]
"""A host by its index, or the head node."""

Command = tuple[str, ...]

_NAMESPACE = re.compile(r"stretto-([0-9a-f]{6})-(?:switch|head|h[0-9]+)")
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
_SET_CONGESTION = f"echo cubic 2>/dev/null > {_CONGESTION} || echo reno > {_CONGESTION}"
"""Sets TCP congestion control to cubic, the default of most kernels, or else to reno. The machine's
own choice is not inherited: BBR, for one, pauses each connection for 200 ms every ten seconds.
"""
_PACKETS = 1_000_000
"""Packet loss is expressed as a number of packets out of this many."""


@dataclass(frozen=True, slots=True)
class LabSpec:
    """The requested cluster; each link carries ``bits_per_s`` in each direction."""

    hosts: int
    ranks_per_host: int = 1
    bits_per_s: int | None = None
    """None leaves the links as fast as the machine allows."""
    loss: float = 0.0
    """Fraction of packets that each host drops on arrival."""

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
        """Number of ranks on all hosts together."""
        return self.hosts * self.ranks_per_host

    @property
    def nodes(self) -> tuple[LabNode, ...]:
        """The hosts in order, then the head: all namespaces with a link."""
        return (*range(self.hosts), HEAD)


@dataclass(frozen=True, slots=True)
class LabNames:
    """Names of one lab's parts; all contain its id of six hexadecimal digits."""

    lab_id: str

    @property
    def switch(self) -> str:
        """The namespace that holds the bridge."""
        return f"stretto-{self.lab_id}-switch"

    @property
    def bridge(self) -> str:
        """The bridge that joins all links."""
        return f"stb-{self.lab_id}"

    @property
    def link(self) -> str:
        """The network interface inside a host or the head."""
        return f"ste-{self.lab_id}"

    def namespace(self, node: LabNode) -> str:
        """Return the namespace of ``node``."""
        return f"stretto-{self.lab_id}-{node if node == HEAD else f'h{node}'}"

    def port(self, node: LabNode) -> str:
        """Return the interface of the switch on the link to ``node``."""
        return f"stp-{self.lab_id}-{node}"


def address(node: LabNode) -> str:
    """Return the address of a node, from the range reserved for benchmarks (RFC 2544)."""
    return "198.18.0.1" if node == HEAD else f"198.18.0.{10 + int(node)}"


def lab_id_of(namespace: str) -> str | None:
    """Return the id of the lab that a namespace belongs to; None if it belongs to no lab."""
    match = _NAMESPACE.fullmatch(namespace)
    return match.group(1) if match else None


def host_of(spec: LabSpec, rank: int) -> int:
    """Return the host of a rank; consecutive ranks share a host."""
    return rank // spec.ranks_per_host


def build_commands(spec: LabSpec, lab_id: str) -> tuple[Command, ...]:
    """Return the commands that build the lab, in order; they must run as root."""
    names = LabNames(lab_id)
    switch = ("ip", "-n", names.switch)
    commands: list[Command] = [
        ("ip", "netns", "add", names.switch),
        (*switch, "link", "add", names.bridge, "type", "bridge"),
        (*switch, "link", "set", names.bridge, "up"),
    ]
    for node in spec.nodes:
        commands += _attach(names, node)
        if spec.bits_per_s is not None:
            commands += _shape_bandwidth(names, node, spec.bits_per_s)
        if spec.loss:
            commands += _add_packet_loss(names, node, spec.loss)
    return tuple(commands)


def _attach(names: LabNames, node: LabNode) -> Iterator[Command]:
    inside, port = names.namespace(node), names.port(node)
    switch, host = ("ip", "-n", names.switch), ("ip", "-n", inside)
    ends = (port, "type", "veth", "peer", "name", names.link, "netns", inside)
    yield ("ip", "netns", "add", inside)
    yield (*switch, "link", "add", *ends)
    yield (*switch, "link", "set", port, "master", names.bridge, "up")
    yield (*host, "addr", "add", f"{address(node)}/24", "dev", names.link)
    yield (*host, "link", "set", "lo", "up")
    yield (*host, "link", "set", names.link, "up")
    yield ("ip", "netns", "exec", inside, "sh", "-c", _SET_CONGESTION)


def _shape_bandwidth(names: LabNames, node: LabNode, bits_per_s: int) -> Iterator[Command]:
    """Limit the rate at both ends: traffic from the host and traffic to it."""
    bucket = ("root", "tbf", "rate", f"{bits_per_s}bit", "burst", "128kb", "latency", "100ms")
    yield ("tc", "-n", names.namespace(node), "qdisc", "add", "dev", names.link, *bucket)
    yield ("tc", "-n", names.switch, "qdisc", "add", "dev", names.port(node), *bucket)


def _add_packet_loss(names: LabNames, node: LabNode, loss: float) -> Iterator[Command]:
    inside = names.namespace(node)
    # Otherwise a "packet" has up to 64 KB of segments, and a loss drops 44 of them in a row.
    yield ("ip", "-n", inside, "link", "set", names.link, "gso_max_segs", "1")
    if node == HEAD:
        return
    dropped = f"numgen random mod {_PACKETS} < {max(1, round(loss * _PACKETS))} drop"
    rules = (
        "add table inet stretto",
        "add chain inet stretto arriving { type filter hook input priority 0; }",
        f'add rule inet stretto arriving iifname "{names.link}" {dropped}',
    )
    yield ("ip", "netns", "exec", inside, "nft", "; ".join(rules))

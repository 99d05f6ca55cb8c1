"""Which interface this rank talks over, what it is worth, and how many ports are left."""

import ipaddress
import socket
from pathlib import Path

import psutil

from stretto.cluster.interface import interface_towards
from stretto.cluster.world import World
from stretto.doctor.records import Network
from stretto.errors import LaunchError

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SOCKETS = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


def look_at_network(world: World) -> Network:
    """Return what is known of the interface that ``world`` names, and of the way to its store."""
    meeting_host = world.meeting.host if world.meeting else "127.0.0.1"
    asked = world.interface or ""
    addresses = {name: _address_of(name) for name in psutil.net_if_addrs()}
    towards = _towards(meeting_host)
    states = psutil.net_if_stats()
    is_up = asked in states and bool(states[asked].isup)
    asked_address = addresses.get(asked, "")
    low, high = _ephemeral_range()
    return Network(
        asked=asked,
        known=tuple(sorted(addresses)),
        asked_is_up=is_up,
        asked_address=asked_address,
        towards=towards,
        # A rank whose interface is of no use still takes part, by the kernel's own choice.
        address=(asked_address if is_up else "") or addresses.get(towards, ""),
        ports_low=low,
        ports_high=high,
        ports_used=_ports_used(low, high),
    )


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach ``address``."""
    return bool(address) and ipaddress.ip_address(address).is_loopback


def _towards(host: str) -> str:
    try:
        return interface_towards(host)
    except LaunchError:
        return ""


def _address_of(name: str) -> str:
    """Return the interface's address that others could use: IPv4 first, link-local never."""
    entries = psutil.net_if_addrs()[name]
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family and not ipaddress.ip_address(entry.address).is_link_local:
                return str(entry.address)
    return ""


def _ephemeral_range() -> tuple[int, int]:
    low, high = _RANGE.read_text().split()
    return int(low), int(high)


def _ports_used(low: int, high: int) -> int:
    """Count the local ports of the ephemeral range that some socket of this host holds."""
    ports = set()
    for table in _SOCKETS:
        if table.exists():
            rows = table.read_text().splitlines()[1:]
            ports |= {int(row.split()[1].rpartition(":")[2], 16) for row in rows}
    return sum(low <= port <= high for port in ports)

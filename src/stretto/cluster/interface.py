"""Which network interface leads to an address, and whether one that a person named is of use."""

import socket

import psutil

from stretto.errors import ConfigError, LaunchError
from stretto.telemetry.wording import printable


def interface_towards(host: str) -> str:
    """Return the interface of this machine that the kernel would use to reach ``host``.

    Nothing is sent: connecting a datagram socket only asks the routing table.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            mine = probe.getsockname()[0]
    except OSError as failure:
        raise LaunchError(
            f"no route to {host}: {failure}; check MASTER_ADDR, or name the interface to talk over "
            "in STRETTO_INTERFACE"
        ) from failure
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == mine for entry in addresses):
            return str(name)
    raise LaunchError(f"no interface holds {mine}, from which {host} is reached")


def check_interface(name: str) -> None:
    """Refuse a named interface that this host does not have, or that has no address."""
    known = {
        found: any(entry.family in (socket.AF_INET, socket.AF_INET6) for entry in entries)
        for found, entries in psutil.net_if_addrs().items()
    }
    if known.get(name):
        return
    wrong = "it has no address" if name in known else "no such interface"
    usable = ", ".join(found for found, has_address in known.items() if has_address)
    raise ConfigError(
        f"the interface {printable(name)} (STRETTO_INTERFACE or GLOO_SOCKET_IFNAME): {wrong} on "
        f"this host; there are {usable or 'none with an address'}"
    )

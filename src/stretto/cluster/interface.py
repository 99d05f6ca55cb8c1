"""Which network interface leads to an address."""

import socket

import psutil

from stretto.errors import LaunchError


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

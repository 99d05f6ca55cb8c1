"""From a host's name to an address: the resolver's, or the one Slurm itself uses."""

import socket
import subprocess
from dataclasses import replace
from ipaddress import ip_address

from stretto.cluster.world import World
from stretto.errors import LaunchError


def with_address(world: World) -> World:
    """Return ``world`` with a meeting whose host can be connected to.

    Slurm's node names need not be known to the resolver: Slurm has addresses of its own for them.
    """
    if world.meeting is None:
        return world
    host = world.meeting.host
    if found := _address_of(host, world):
        return world
    address = _slurm_address(host) if world.launcher == "slurm" else None
    if address is None:
        what = "leads to this very host" if found is None else "is not known to the resolver"
        raise LaunchError(
            f"the meeting point {host} has no address for all hosts: the name {what} (see "
            "/etc/hosts); set MASTER_ADDR to an address of rank 0's host on all ranks"
        )
    return replace(world, meeting=replace(world.meeting, host=address))


def _address_of(host: str, world: World) -> str | None:
    """Return where a name leads, "" where nowhere, None where each host would find itself.

    Some systems give a machine's own name a loopback address: rank 0 would listen there, and
    nobody else would find it. A loopback address that is given as such is meant.
    """
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return ""
    is_name = address != host
    itself = is_name and world.mesh.hosts > 1 and ip_address(address).is_loopback
    return None if itself else address


def _slurm_address(node: str) -> str | None:
    """Ask the controller; None when there is no answer."""
    command = ["scontrol", "show", "node", "--oneliner", node]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    fields = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    return fields.get("NodeAddr")

"""From a host's name to an address: the resolver's, or the one Slurm itself uses."""

import socket
import subprocess
from dataclasses import replace

from stretto.cluster.world import World
from stretto.errors import LaunchError


def with_address(world: World) -> World:
    """Return ``world`` with a meeting whose host can be connected to.

    Slurm's node names need not be known to the resolver: Slurm has addresses of its own for them.
    """
    if world.meeting is None or _resolves(world.meeting.host):
        return world
    host = world.meeting.host
    address = _slurm_address(host) if world.launcher == "slurm" else None
    if address is None:
        raise LaunchError(
            f"the meeting point {host} has no address here: the resolver does not know it; set "
            "MASTER_ADDR to an address of rank 0's host on all ranks"
        )
    return replace(world, meeting=replace(world.meeting, host=address))


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _slurm_address(node: str) -> str | None:
    """Ask the controller; None when there is no answer."""
    command = ["scontrol", "show", "node", "--oneliner", node]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    fields = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    return fields.get("NodeAddr")

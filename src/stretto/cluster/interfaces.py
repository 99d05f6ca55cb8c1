"""Resolve the store's host to an address, and find or check network interfaces."""

import socket
import subprocess
from dataclasses import replace
from ipaddress import ip_address

import psutil

from stretto.cluster.world import World
from stretto.errors import ConfigError, LaunchError
from stretto.telemetry.event_text import strip_unprintable


def resolve_store_host(world: World) -> World:
    """Return ``world`` with a store host that every rank can connect to.

    The system's resolver may not know Slurm's node names; Slurm's controller is asked then.

    Raises:
        LaunchError: The name has no address that all hosts can use.
    """
    if world.store_address is None:
        return world
    host = world.store_address.host
    if resolved_address := _resolve_host(host, world):
        return world
    address = _slurm_node_address(host) if world.launcher == "slurm" else None
    if address is None:
        problem = (
            "resolves to a loopback address"
            if resolved_address is None
            else "is not known to the resolver"
        )
        raise LaunchError(
            f"the store's host {host} has no address for all hosts: the name {problem} (see "
            "/etc/hosts); set MASTER_ADDR to an address of rank 0's host on all ranks"
        )
    return replace(world, store_address=replace(world.store_address, host=address))


def _resolve_host(host: str, world: World) -> str | None:
    """Return the address of ``host``: "" if unknown, None if each host would reach itself.

    Some systems resolve a machine's own name to a loopback address. Rank 0 would listen there,
    and no other host could connect. A loopback address that was given as a number is accepted.
    """
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return ""
    is_name = address != host
    resolves_to_self = is_name and world.mesh.hosts > 1 and ip_address(address).is_loopback
    return None if resolves_to_self else address


def _slurm_node_address(node: str) -> str | None:
    """Return the address that Slurm's controller has for ``node``, None without an answer."""
    command = ["scontrol", "show", "node", "--oneliner", node]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    fields = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    return fields.get("NodeAddr")


def interface_for_host(host: str) -> str:
    """Return the interface of this machine that the kernel would use to reach ``host``.

    Nothing is sent: connecting a datagram socket only asks the routing table.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            local_address = probe.getsockname()[0]
    except OSError as failure:
        raise LaunchError(
            f"no route to {host}: {failure}; check MASTER_ADDR, or name the network interface "
            "in STRETTO_INTERFACE"
        ) from failure
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == local_address for entry in addresses):
            return str(name)
    raise LaunchError(f"no interface holds {local_address}, from which {host} is reached")


def check_interface(name: str) -> None:
    """Raise ConfigError if this host has no interface ``name``, or it has no address."""
    has_address_by_name = {
        found: any(entry.family in (socket.AF_INET, socket.AF_INET6) for entry in entries)
        for found, entries in psutil.net_if_addrs().items()
    }
    if has_address_by_name.get(name):
        return
    problem = "it has no address" if name in has_address_by_name else "no such interface"
    usable = ", ".join(found for found, has_address in has_address_by_name.items() if has_address)
    raise ConfigError(
        f"the interface {strip_unprintable(name)} (STRETTO_INTERFACE or GLOO_SOCKET_IFNAME): "
        f"{problem} on this host; there are {usable or 'none with an address'}"
    )

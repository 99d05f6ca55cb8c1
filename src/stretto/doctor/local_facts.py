"""Collect the facts of this machine: everything a rank knows without its peers."""

import errno
import hashlib
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
import torch._C._distributed_c10d as c10d

import stretto
from stretto.cluster.interfaces import interface_for_host
from stretto.cluster.rendezvous import rank_info_of
from stretto.cluster.world import World
from stretto.doctor.records import (
    Code,
    Facts,
    Folder,
    Machine,
    Network,
    RankIdentity,
    RunRequirements,
)
from stretto.errors import LaunchError

_TEST_BYTES = bytes(4096)
_NO_SPACE_ERRORS = {errno.ENOSPC, errno.EDQUOT}


def inspect_folder(path: Path) -> Folder:
    """Write and remove a test file in the run's folder; return that and the free space.

    The run would create a missing folder, so its nearest existing parent is tested.
    """
    existing_folder = next(
        folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
    )
    filesystem = os.statvfs(existing_folder)
    failure = _try_to_write(existing_folder)
    return Folder(
        path=str(path),
        free_bytes=filesystem.f_bavail * filesystem.f_frsize,
        free_inodes=filesystem.f_favail if filesystem.f_files else None,
        error=(failure.strerror or str(failure)) if failure else "",
        is_full=failure is not None and failure.errno in _NO_SPACE_ERRORS,
    )


def _try_to_write(folder: Path) -> OSError | None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".stretto-doctor-") as test_file:
            test_file.write(_TEST_BYTES)
            test_file.flush()
            # Some file systems report a full disk only on fsync.
            os.fsync(test_file.fileno())
    except OSError as failure:
        return failure
    return None


_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SOCKET_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))


def inspect_network(world: World) -> Network:
    """Return facts of the requested interface, of the route to the store, and of free ports."""
    store_host = world.store_address.host if world.store_address else "127.0.0.1"
    requested_interface = world.interface or ""
    addresses = {name: _address_of(name) for name in psutil.net_if_addrs()}
    route_interface = _route_interface(store_host)
    states = psutil.net_if_stats()
    is_up = requested_interface in states and bool(states[requested_interface].isup)
    requested_address = addresses.get(requested_interface, "")
    low, high = ephemeral_range()
    return Network(
        requested_interface=requested_interface,
        interface_names=tuple(sorted(addresses)),
        requested_is_up=is_up,
        requested_address=requested_address,
        route_interface=route_interface,
        # Without a usable requested interface the rank takes part over the kernel's choice.
        address=(requested_address if is_up else "") or addresses.get(route_interface, ""),
        ports_low=low,
        ports_high=high,
        ports_used=_ports_used(low, high),
    )


def is_loopback(address: str) -> bool:
    """Return whether only this host can reach ``address``."""
    return bool(address) and ipaddress.ip_address(address).is_loopback


def _route_interface(host: str) -> str:
    try:
        return interface_for_host(host)
    except LaunchError:
        return ""


def _address_of(name: str) -> str:
    """Return the interface's address that peers can use: IPv4 first, never link-local."""
    entries = psutil.net_if_addrs()[name]
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family and not ipaddress.ip_address(entry.address).is_link_local:
                return str(entry.address)
    return ""


def ephemeral_range() -> tuple[int, int]:
    """Return the lowest and highest port that the kernel gives to outgoing connections."""
    low, high = _PORT_RANGE_FILE.read_text().split()
    return int(low), int(high)


def _ports_used(low: int, high: int) -> int:
    """Count the local ports of the ephemeral range that some socket of this host holds."""
    ports = set()
    for table in _SOCKET_TABLES:
        if table.exists():
            rows = table.read_text().splitlines()[1:]
            ports |= {int(row.split()[1].rpartition(":")[2], 16) for row in rows}
    return sum(low <= port <= high for port in ports)


_BACKENDS = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
_SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SCONTROL_TIMEOUT_S = 2.0


def collect_facts(
    world: World,
    detected_by: str,
    requirements: RunRequirements,
    on_activity: Callable[[str], None],
) -> Facts:
    """Return this rank's facts.

    Args:
        world: This process's rank, size, host and store.
        detected_by: What the launcher was detected by.
        requirements: What the run needs of the machines.
        on_activity: Called with a description before each step that may hang, such as a write to
            a disk on a dead server.
    """
    on_activity("looking at the machine")
    machine = inspect_machine(world, requirements)
    on_activity("reading stretto's own source files")
    code = inspect_code()
    on_activity("looking at the network interfaces")
    network = inspect_network(world)
    on_activity(f"writing a test file in {requirements.folder}")
    folder = inspect_folder(Path(requirements.folder))
    return Facts(_rank_identity(world, detected_by), machine, code, network, folder)


def inspect_code() -> Code:
    """Return versions and a digest of every source file of the running package."""
    root = Path(stretto.__file__).parent
    files = sorted(path for path in root.rglob("*.py"))
    return Code(
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": version("numpy"),
        },
        files={path.relative_to(root).as_posix(): _digest(path) for path in files},
        backends=tuple(name for name, group in _BACKENDS.items() if hasattr(c10d, group)),
        cuda=torch.version.cuda or "",
    )


def inspect_machine(world: World, requirements: RunRequirements) -> Machine:
    """Return cores, memory, accelerators and limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gpus = range(torch.cuda.device_count())
    shared = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.exists() else None
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        threads=requirements.threads or world.threads,
        memory_bytes=psutil.virtual_memory().total,
        gpus=tuple(torch.cuda.get_device_name(index) for index in gpus),
        shm_bytes=shared,
        files_soft=_finite_limit(soft),
        files_hard=_finite_limit(hard),
        kill_wait_s=_kill_wait_s(world),
    )


def _rank_identity(world: World, detected_by: str) -> RankIdentity:
    store_address = world.store_address
    return RankIdentity(
        rank_info=rank_info_of(world),
        # A launcher's host name may end in "/".
        host=world.host_name.rstrip("/") or socket.gethostname(),
        machine_id=_BOOT_ID.read_text().strip(),
        pid=os.getpid(),
        detected_by=detected_by,
        store_address=f"{store_address.host}:{store_address.port}" if store_address else "",
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _finite_limit(limit: int) -> int:
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def _kill_wait_s(world: World) -> float | None:
    """Return Slurm's seconds between TERM and KILL; None without Slurm or its `scontrol`."""
    scontrol = shutil.which("scontrol")
    if world.launcher != "slurm" or scontrol is None:
        return None
    command = [scontrol, "show", "config"]
    try:
        shown = subprocess.run(
            command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S, check=True
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    found = re.search(r"^KillWait\s*=\s*(\d+)", shown, re.MULTILINE)
    return float(found.group(1)) if found else None

"""Look at this machine: everything a rank can tell of itself without its peers."""

import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
import torch._C._distributed_c10d as c10d

import stretto
from stretto.cluster.meet import card_of
from stretto.cluster.world import World
from stretto.doctor.folder import look_at_folder
from stretto.doctor.network import look_at_network
from stretto.doctor.records import Code, Facts, Machine, Place, Purpose

_BACKENDS = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
_SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SCONTROL_S = 2.0


def gather(world: World, why: str, purpose: Purpose, note: Callable[[str], None]) -> Facts:
    """Return this rank's facts.

    Args:
        world: who we are.
        why: what showed the launcher.
        purpose: what the run will need.
        note: told before each look that may hang, as a disk on a dead server does.
    """
    note("looking at the machine")
    machine = look_at_machine(world, purpose)
    note("reading stretto's own source files")
    code = look_at_code()
    note("looking at the network interfaces")
    network = look_at_network(world)
    note(f"writing a file for trial in {purpose.folder}")
    folder = look_at_folder(Path(purpose.folder))
    return Facts(_place(world, why), machine, code, network, folder)


def look_at_code() -> Code:
    """Return versions, and a digest of every source file of the package that runs."""
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


def look_at_machine(world: World, purpose: Purpose) -> Machine:
    """Return cores, memory, accelerators and limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gpus = range(torch.cuda.device_count())
    shared = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.exists() else None
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        threads=purpose.threads or world.threads,
        memory_bytes=psutil.virtual_memory().total,
        gpus=tuple(torch.cuda.get_device_name(index) for index in gpus),
        shm_bytes=shared,
        files_soft=_finite(soft),
        files_hard=_finite(hard),
        kill_wait_s=_kill_wait_s(world),
    )


def _place(world: World, why: str) -> Place:
    meeting = world.meeting
    return Place(
        card=card_of(world),
        # What a launcher calls a host may end in an empty part.
        host=world.host_name.rstrip("/") or socket.gethostname(),
        machine_id=_BOOT_ID.read_text().strip(),
        pid=os.getpid(),
        why=why,
        meeting=f"{meeting.host}:{meeting.port}" if meeting else "",
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _finite(limit: int) -> int:
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def _kill_wait_s(world: World) -> float | None:
    """Ask Slurm what it leaves between TERM and KILL, where it started us and can be asked."""
    scontrol = shutil.which("scontrol")
    if world.launcher != "slurm" or scontrol is None:
        return None
    command = [scontrol, "show", "config"]
    try:
        shown = subprocess.run(
            command, capture_output=True, text=True, timeout=_SCONTROL_S, check=True
        ).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    found = re.search(r"^KillWait\s*=\s*(\d+)", shown, re.MULTILINE)
    return float(found.group(1)) if found else None

"""The memory that a job may still take, by the limits of its control groups.

A batch system or a container puts a limit on a group of processes; nothing else shows it. Shared
memory counts towards it, and who goes beyond is killed. Limits hold for all groups below theirs,
so the way from ours up to the root is looked at, in either version of the interface.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Interface:
    """How one version of control groups names its files."""

    mount: str
    limit: str
    usage: str
    reclaimable: tuple[str, ...]
    """Lines of memory.stat: files read or written, which are in use until somebody needs room."""


_V1 = _Interface(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Interface("sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file"))


def memory_left(root: Path = Path("/")) -> int:
    """Return the bytes that this process's groups still allow; `sys.maxsize` without a limit.

    All files are looked for below ``root``. What is not there, or not to be read, sets no limit.
    """
    folders = (
        (interface, root / interface.mount / above.relative_to("/"))
        for interface, group in _groups(root)
        for above in (group, *group.parents)
    )
    return min((_left(folder, interface) for interface, folder in folders), default=sys.maxsize)


def _groups(root: Path) -> Iterator[tuple[_Interface, PurePosixPath]]:
    """Yield this process's group in each interface that may limit memory."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            yield _V2, PurePosixPath(group)
        elif "memory" in controllers.split(","):
            yield _V1, PurePosixPath(group)


def _left(folder: Path, interface: _Interface) -> int:
    """Return what the group in ``folder`` may still take, by its own limit alone."""
    limit, usage = (_read(folder / name).strip() for name in (interface.limit, interface.usage))
    if not (limit.isdecimal() and usage.isdecimal()):  # "max", or a group we cannot see
        return sys.maxsize
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    reclaimable = sum(int(stat.get(name, 0)) for name in interface.reclaimable)
    return max(int(limit) - max(int(usage) - reclaimable, 0), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux, no such controller, or a group that only the host sees
        return ""

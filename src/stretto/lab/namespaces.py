"""Build and remove a lab's network namespaces, and clear those of labs that were killed.

Every live lab holds an flock on a file named after it, so a lock that can be acquired belongs to a
dead lab. A lab locks its file before it creates anything and removes the file after everything is
gone. The kernel releases the lock when the owner dies in any way. After acquiring a lock, check
that the locked file is still the one in the folder: another process may have acquired it first,
cleaned up and removed the file, and a lock on a removed file has no meaning.
"""

import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import LabError
from stretto.lab.spec import LabNames, LabNode, LabSpec, build_commands, lab_id_of
from stretto.launch.worker_group import with_parent_death_signal

_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "setpriv": "util-linux",
    "taskset": "util-linux",
}


def require_tools(spec: LabSpec) -> None:
    """Raise a `LabError` that names what is missing on this machine and how to install it."""
    if not sys.platform.startswith("linux"):
        raise LabError(f"a lab needs Linux's network namespaces, and this is {sys.platform}")
    needed = ["ip", "tc", "setpriv", "taskset", *(["nft"] if spec.loss else [])]
    missing = [tool for tool in needed if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in missing}))
        raise LabError(
            f"a lab needs {', '.join(missing)}, not found on PATH; install with: "
            f"apt-get install {packages}"
        )
    if os.geteuid() != 0:
        raise LabError("a lab makes network namespaces, which only root may; run it as root")


def run_tool(argv: Sequence[str], *, lock_fd: int | None = None) -> str:
    """Run a command and return its output; raise a `LabError` if it fails.

    The command dies with us. It inherits the lab's lock, so that a lab killed during a command does
    not count as dead while the command may still create something. It has a session of its own, so
    that Ctrl-C, meant for us, does not interrupt it.
    """
    completed = subprocess.run(
        with_parent_death_signal(argv),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        pass_fds=() if lock_fd is None else (lock_fd,),
    )
    if completed.returncode != 0:
        raise LabError(
            f"`{shlex.join(argv)}` failed with exit code {completed.returncode}: "
            f"{completed.stderr.strip() or 'it said nothing'}; a lab needs root with "
            "CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: --privileged)"
        )
    return completed.stdout


LOCK_FOLDERS = (Path("/run/stretto"), Path("/tmp/stretto-run"))
"""Folders for locks; the first writable one is used, the same for all labs of a machine."""

_LOCK = re.compile(r"lab-([0-9a-f]{6})\.lock")


def lock_folder() -> Path:
    """Return the folder of the locks; create it if needed."""
    for folder in LOCK_FOLDERS:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise LabError(
        f"cannot write to {' or '.join(map(str, LOCK_FOLDERS))}, where labs keep their locks"
    )


def locked_ids(folder: Path) -> set[str]:
    """Return the ids of all lock files, whether locked or not."""
    matches = (_LOCK.fullmatch(path.name) for path in folder.iterdir())
    return {match.group(1) for match in matches if match}


@contextmanager
def claim_new_id(folder: Path) -> Iterator[tuple[str, int]]:
    """Choose an unused lab id; yield it with the descriptor of its held lock."""
    lab_id, lock_fd = "", None
    while lock_fd is None:
        lab_id = secrets.token_hex(3)
        lock_fd = _try_lock(folder, lab_id)
    try:
        yield lab_id, lock_fd
    finally:
        os.close(lock_fd)


@contextmanager
def claim_if_dead(folder: Path, lab_id: str) -> Iterator[bool]:
    """Yield whether the lab is dead; if so, hold its lock so that the caller can clear it."""
    lock_fd = _try_lock(folder, lab_id)
    try:
        yield lock_fd is not None
    finally:
        if lock_fd is not None:
            os.close(lock_fd)


def remove_lock(folder: Path, lab_id: str) -> None:
    """Remove the lock file; the holder of the lock calls this last."""
    _lock_path(folder, lab_id).unlink(missing_ok=True)


def _try_lock(folder: Path, lab_id: str) -> int | None:
    path = _lock_path(folder, lab_id)
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(lock_fd).st_ino:
            return lock_fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock_fd)
    return None


def _lock_path(folder: Path, lab_id: str) -> Path:
    return folder / f"lab-{lab_id}.lock"


_DEATH_TIMEOUT_S = 10.0


def clear_leftovers(folder: Path) -> tuple[str, ...]:
    """Remove everything that dead labs left and return their ids; live labs are not touched.

    Everything a lab creates (links, addresses, processes) is inside its namespaces, so only these
    and the lock files have to be found.
    """
    lab_ids = {lab for lab in map(lab_id_of, _namespaces()) if lab} | locked_ids(folder)
    cleared = []
    for lab_id in sorted(lab_ids):
        with claim_if_dead(folder, lab_id) as is_dead:
            if is_dead:
                remove_lab(lab_id)
                remove_lock(folder, lab_id)
                cleared.append(lab_id)
    return tuple(cleared)


def remove_lab(lab_id: str) -> None:
    """Kill all processes of a lab and remove its namespaces; the caller holds its lock."""
    lab_namespaces = [namespace for namespace in _namespaces() if lab_id_of(namespace) == lab_id]
    for namespace in lab_namespaces:
        _end_processes(namespace)
    for namespace in lab_namespaces:
        run_tool(("ip", "netns", "del", namespace))


def _namespaces() -> list[str]:
    # A line is a name, or "name (id: 3)".
    return [line.split()[0] for line in run_tool(("ip", "netns", "list")).splitlines() if line]


def _end_processes(namespace: str) -> None:
    """Kill until no process is left, because a process that forks may add another meanwhile."""
    deadline_s = time.monotonic() + _DEATH_TIMEOUT_S
    while pids := run_tool(("ip", "netns", "pids", namespace)).split():
        if time.monotonic() > deadline_s:
            raise LabError(
                f"processes {', '.join(pids)} in namespace {namespace} do not die of KILL within "
                f"{_DEATH_TIMEOUT_S:g} s; look what they wait for in /proc/PID/wchan"
            )
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Bytes on one host's link, counted at the host's end; retransmissions are included."""

    host: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class RunningLab:
    """A lab that exists; made by `open_lab`."""

    spec: LabSpec
    names: LabNames

    def command_in(self, node: LabNode, argv: Sequence[str]) -> list[str]:
        """Return ``argv`` wrapped so that it runs on ``node``."""
        return ["ip", "netns", "exec", self.names.namespace(node), *argv]

    def counters(self) -> tuple[HostBytes, ...]:
        """Return the bytes each host has sent and received since the lab was built."""
        return tuple(self._count(host) for host in range(self.spec.hosts))

    def _count(self, host: int) -> HostBytes:
        inside = self.names.namespace(host)
        shown = run_tool(("ip", "-n", inside, "-s", "-j", "link", "show", "dev", self.names.link))
        counted = json.loads(shown)[0]["stats64"]
        return HostBytes(host, counted["tx"]["bytes"], counted["rx"]["bytes"])


@contextmanager
def open_lab(spec: LabSpec, *, log_line: Callable[[str], None]) -> Iterator[RunningLab]:
    """Clear dead labs, build this one, yield it, and remove it completely at the end.

    Raises:
        LabError: A tool or permission is missing, or a command failed.
    """
    require_tools(spec)
    folder = lock_folder()
    for dead_id in clear_leftovers(folder):
        log_line(f"cleared what lab {dead_id} had left")
    with claim_new_id(folder) as (lab_id, lock_fd):
        try:
            for command in build_commands(spec, lab_id):
                run_tool(command, lock_fd=lock_fd)
            yield RunningLab(spec, LabNames(lab_id))
        finally:
            remove_lab(lab_id)
            remove_lock(folder, lab_id)

"""The store where ranks meet: bound to one address, outliving every group.

It lives in the launcher; under srun and mpirun, which hold none, in a process that rank 0 starts,
so that a rank 0 that hangs does not take the others' meeting point with it.
"""

import atexit
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store, TCPStore

from stretto.cluster.world import Meeting, World
from stretto.errors import LaunchError

FAREWELL = b"done\n"
"""What whoever started a store says when it is no longer needed. A pipe that closes without it
was a death: then the store stays a moment, so that the others can read whose."""

_DEAF = 'trap "" INT TERM HUP USR1 USR2; exec "$@"'
"""A scheduler signals every process of a job; this one ends with its standard input only."""


@dataclass(frozen=True, slots=True)
class HeldStore:
    """A store this process serves; it dies with the process."""

    store: TCPStore
    host: str
    port: int


def hold_store(host: str = "127.0.0.1", port: int = 0) -> HeldStore:
    """Serve a store on ``host`` alone; ``port`` 0 takes a free one."""
    return serve_on(listen(host, port))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host`` alone.

    A TCPStore left to itself listens on every interface; one given a bound socket stays there.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as failure:
        listener.close()
        raise LaunchError(
            f"the store cannot listen on {host}:{port}: {failure.strerror}; "
            "name an address of this machine and a free port"
        ) from failure
    return listener


def serve_on(listener: socket.socket) -> HeldStore:
    """Serve a store on a listening socket, which is the store's from now on."""
    host, port = listener.getsockname()[:2]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return HeldStore(store, host, port)


def join_store(world: World, timeout_s: float = 300.0) -> Store:
    """Connect to the world's store, starting it first where that falls to rank 0."""
    meeting = world.meeting
    if meeting is None:
        return HashStore()
    if meeting.held_by_rank_0 and world.rank == 0:
        _start_store(meeting)
    return connect_store(meeting, world.rank, timeout_s)


def connect_store(meeting: Meeting, rank: int, timeout_s: float) -> Store:
    """Return a connection of one's own to a store that is there or comes up meanwhile."""
    try:
        return TCPStore(
            meeting.host, meeting.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, ValueError) as failure:
        raise LaunchError(
            f"rank {rank} cannot reach the store at {meeting.host}:{meeting.port} "
            f"within {timeout_s:g} s: is the launcher running, is the port open?"
        ) from failure


def _start_store(meeting: Meeting) -> None:
    """Bind here, where a mistake can be told at once, and let a child of ours serve."""
    try:
        listener = listen(meeting.host, meeting.port)
    except LaunchError as wrong:
        raise LaunchError(
            f"rank 0 holds the meeting point, but {wrong}: is rank 0 on {meeting.host}, is an old "
            "job still there? MASTER_ADDR and MASTER_PORT override it for all ranks"
        ) from None
    with listener:
        listener.set_inheritable(True)
        fd = str(listener.fileno())
        process = subprocess.Popen(
            ["/bin/sh", "-c", _DEAF, "sh", sys.executable, "-m", "stretto.cluster.serve", fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    # Referenced until we end: a pipe that is collected is closed, and closing it ends the store.
    atexit.register(_let_go, process)


def _let_go(process: "subprocess.Popen[bytes]") -> None:
    """End the store at once: we end in good order, and so have the others."""
    with suppress(BrokenPipeError):
        process.communicate(FAREWELL)

"""The store where ranks meet: held by the launcher, bound to one address, outliving every group."""

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store, TCPStore

from stretto.cluster.world import Meeting, World
from stretto.errors import LaunchError


@dataclass(frozen=True, slots=True)
class HeldStore:
    """A store this process serves; it dies with the process."""

    store: TCPStore
    host: str
    port: int


def hold_store(host: str = "127.0.0.1", port: int = 0) -> HeldStore:
    """Serve a store on ``host`` alone; ``port`` 0 takes a free one.

    A TCPStore left to itself listens on every interface; one given a bound socket stays there.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as failure:
        listener.close()
        raise LaunchError(
            f"the store cannot listen on {host}:{port}: {failure.strerror}; "
            "name an address of this machine and a free port"
        ) from failure
    listener.listen(1024)
    bound = listener.getsockname()[1]
    store = TCPStore(
        host, bound, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return HeldStore(store, host, bound)


def join_store(world: World, timeout_s: float = 300.0) -> Store:
    """Connect to the world's store, serving it first where that falls to rank 0."""
    meeting = world.meeting
    if meeting is None:
        return HashStore()
    if meeting.held_by_rank_0 and world.rank == 0:
        return hold_store(meeting.host, meeting.port).store
    return _connect(meeting, world.rank, timeout_s)


def _connect(meeting: Meeting, rank: int, timeout_s: float) -> Store:
    try:
        return TCPStore(
            meeting.host, meeting.port, is_master=False, timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, ValueError) as failure:
        raise LaunchError(
            f"rank {rank} cannot reach the store at {meeting.host}:{meeting.port} "
            f"within {timeout_s:g} s: is the launcher running, is the port open?"
        ) from failure

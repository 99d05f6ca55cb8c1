"""Serve and connect to the job's `TCPStore`, bound to one address only.

The launcher serves the store. Under srun and mpirun, which have none, rank 0 starts a separate
process for it, so that the store survives when rank 0 hangs.

That process is ``python -m stretto.cluster.store [FD]``: it serves the store until its standard
input closes. FD is an inherited socket that already listens. Without FD, ``--host`` and ``--port``
say where to listen, and the first line of output is the port; the lab starts its store this way.
"""

import argparse
import atexit
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store, TCPStore

from stretto.cluster.world import StoreAddress, World
from stretto.errors import LaunchError

SHUTDOWN_MESSAGE = b"done\n"
"""Sent to the store process over its standard input, to end it at once. If the pipe closes without
this message, its owner died. The store then stays for `_LINGER_S`, so that ranks can read the
failure report."""

_IGNORE_SIGNALS_SCRIPT = 'trap "" INT TERM HUP USR1 USR2; exec "$@"'
"""Shell wrapper that ignores signals: a scheduler signals all processes of a job, but the store
process must end with its standard input only."""

_LINGER_S = 3.0
"""Longer than the ranks need to notice a death, and short for a process without an owner."""


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A store that this process serves; it ends with the process."""

    store: TCPStore
    host: str
    port: int


def serve_store(host: str = "127.0.0.1", port: int = 0) -> StoreServer:
    """Serve a store on the address ``host`` only; ``port`` 0 takes a free port."""
    return serve_store_on_listener(open_listener(host, port))


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address ``host`` only.

    A TCPStore that opens its own socket listens on every interface, so it gets a bound one.

    Raises:
        LaunchError: The address is not one of this machine's, or the port is taken.
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


def serve_store_on_listener(listener: socket.socket) -> StoreServer:
    """Serve a store on a listening socket; the store then owns the socket."""
    host, port = listener.getsockname()[:2]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return StoreServer(store, host, port)


def start_or_connect_store(world: World, timeout_s: float = 300.0) -> Store:
    """Connect to the world's store; rank 0 starts it first where the launcher has none."""
    store_address = world.store_address
    if store_address is None:
        return HashStore()
    if store_address.started_by_rank_0 and world.rank == 0:
        _start_store_process(store_address)
    return connect_store(store_address, world.rank, timeout_s)


def connect_store(store_address: StoreAddress, rank: int, timeout_s: float) -> Store:
    """Return a new connection to the store; wait up to ``timeout_s`` until it is served."""
    try:
        return TCPStore(
            store_address.host,
            store_address.port,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as failure:
        raise LaunchError(
            f"rank {rank} cannot reach the store at {store_address.host}:{store_address.port} "
            f"within {timeout_s:g} s: is the launcher running, is the port open?"
        ) from failure


def _start_store_process(store_address: StoreAddress) -> None:
    """Start a child process that serves the store on a socket bound here.

    Binding in this process reports a wrong address or a taken port at once.
    """
    try:
        listener = open_listener(store_address.host, store_address.port)
    except LaunchError as wrong:
        raise LaunchError(
            f"rank 0 must serve the store, but {wrong}: is rank 0 on {store_address.host}, does an "
            "old job still run? MASTER_ADDR and MASTER_PORT override the address for all ranks"
        ) from None
    with listener:
        listener.set_inheritable(True)
        fd = str(listener.fileno())
        process = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                _IGNORE_SIGNALS_SCRIPT,
                "sh",
                sys.executable,
                "-m",
                "stretto.cluster.store",
                fd,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    # atexit keeps a reference to the process. Without one, garbage collection would close the
    # pipe, and the store would end.
    atexit.register(_stop_store_process, process)


def _stop_store_process(process: "subprocess.Popen[bytes]") -> None:
    """End the store at once: this process exits normally, after the other ranks."""
    with suppress(BrokenPipeError):
        process.communicate(SHUTDOWN_MESSAGE)


def main() -> int:
    """Serve a store, print its port, and return once standard input closes."""
    parser = argparse.ArgumentParser(description="serve a store until standard input closes")
    parser.add_argument("fd", nargs="?", type=int, help="a listening socket, inherited")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    try:
        server = _serve(parser.parse_args())
    except LaunchError as failure:
        sys.stderr.write(f"{failure}\n")
        return failure.exit_code
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    if sys.stdin.buffer.read() != SHUTDOWN_MESSAGE:
        time.sleep(_LINGER_S)
    return 0


def _serve(args: argparse.Namespace) -> StoreServer:
    if args.fd is None:
        return serve_store(args.host, args.port)
    return serve_store_on_listener(socket.socket(fileno=args.fd))


if __name__ == "__main__":
    sys.exit(main())

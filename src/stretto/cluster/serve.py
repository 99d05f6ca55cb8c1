"""``python -m stretto.cluster.serve [FD]``: hold a store until standard input closes.

FD is a socket that listens already, inherited from whoever starts this. Without it ``--host``
says where to listen, and the first line of output is the port: so does the head of a lab.
"""

import argparse
import socket
import sys
import time

from stretto.cluster.store import FAREWELL, HeldStore, hold_store, serve_on
from stretto.errors import LaunchError

_LINGER_S = 3.0
"""Longer than the others need to notice a death, shorter than an orphan may live."""


def main() -> int:
    """Serve; print the port once listening; end with standard input."""
    parser = argparse.ArgumentParser(description="hold a store until standard input closes")
    parser.add_argument("fd", nargs="?", type=int, help="a listening socket, inherited")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    try:
        held = _hold(parser.parse_args())
    except LaunchError as failure:
        sys.stderr.write(f"{failure}\n")
        return failure.exit_code
    sys.stdout.write(f"{held.port}\n")
    sys.stdout.flush()
    if sys.stdin.buffer.read() != FAREWELL:
        time.sleep(_LINGER_S)
    return 0


def _hold(args: argparse.Namespace) -> HeldStore:
    if args.fd is None:
        return hold_store(args.host, args.port)
    return serve_on(socket.socket(fileno=args.fd))


if __name__ == "__main__":
    sys.exit(main())

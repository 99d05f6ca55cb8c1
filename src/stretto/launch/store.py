"""``python -m stretto.launch.store``: hold a store on one address until standard input closes.

The head of a lab runs this in a namespace of its own; its first line of output is the port.
"""

import argparse
import sys

from stretto.cluster.store import hold_store
from stretto.errors import LaunchError


def main() -> int:
    """Serve; print the port once listening; end with standard input."""
    parser = argparse.ArgumentParser(description="hold a store until standard input closes")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    try:
        held = hold_store(args.host, args.port)
    except LaunchError as failure:
        sys.stderr.write(f"{failure}\n")
        return failure.exit_code
    sys.stdout.write(f"{held.port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())

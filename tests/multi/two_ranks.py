"""Start a stretto command as two ranks, with the variables that torchrun sets.

torchrun itself is tried in `test_launchers.py`; its own start takes as long as that of two ranks.
"""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.multi.small_run import STRETTO


def on_two_ranks(
    folder: Path, arguments: Sequence[str], limit_s: float = 150
) -> "subprocess.CompletedProcess[str]":
    """Run the command on two ranks; return the highest exit code, and what both have written."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [*STRETTO, *arguments],
            cwd=folder,
            env={**os.environ, **world, **address, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    # Neither writes as much as a pipe holds, so one can be read after the other.
    outputs = [rank.communicate(timeout=limit_s) for rank in ranks]
    stdout, stderr = ("".join(texts) for texts in zip(*outputs, strict=True))
    return subprocess.CompletedProcess(
        [*STRETTO, *arguments], max(abs(rank.returncode) for rank in ranks), stdout, stderr
    )

"""Runs several NCCL ranks on one GPU: each stands for a host, and NVIDIA's MPS runs them together.

    python benchmarks/one_gpu.py --hosts 2 --ranks-per-host 2 -- stretto bench collectives ...

NCCL then uses sockets: a slow network beside a fast GPU, with real streams and overlap. A client of
MPS has two queues to the GPU by default, and streams that share one wait for each other. Each rank
gets eight, as a process without MPS has.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.cluster.store import serve_store

NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
}


def main() -> int:
    """Run the command as every rank; return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    with mps() as mps_variables:
        ranks = start_ranks(args.hosts, args.ranks_per_host, args.command, mps_variables)
        codes = [rank.wait() for rank in ranks]
    return next((code for code in codes if code), 0)


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Start NVIDIA's MPS if it is installed; yield the environment variables of its clients."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("no MPS here: ranks take turns on the GPU", file=sys.stderr)
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "CUDA_MPS_PIPE_DIRECTORY": str(Path(folder) / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(Path(folder) / "log"),
        }
        for path in variables.values():
            Path(path).mkdir()
        subprocess.run([control, "-d"], env={**os.environ, **variables}, check=True)
        try:
            yield variables
        finally:
            subprocess.run(
                [control], input="quit\n", text=True, env={**os.environ, **variables}, check=False
            )


def start_ranks(
    hosts: int, per_host: int, command: list[str], mps_variables: dict[str, str]
) -> list["subprocess.Popen[bytes]"]:
    """Start the ranks; rank 0 inherits the standard output, others write to stderr."""
    store = serve_store()
    started = []
    for rank in range(hosts * per_host):
        variables = {
            "RANK": rank,
            "WORLD_SIZE": hosts * per_host,
            "LOCAL_RANK": rank % per_host,
            "LOCAL_WORLD_SIZE": per_host,
            "GROUP_RANK": rank // per_host,
            "GROUP_WORLD_SIZE": hosts,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "NCCL_HOSTID": f"host{rank}",
            "STRETTO_LAUNCHER": "stretto lab",
        }
        env = {**os.environ, **NCCL, **mps_variables, **{k: str(v) for k, v in variables.items()}}
        started.append(subprocess.Popen(command, env=env, stdout=None if rank == 0 else sys.stderr))
    # The store must outlive the ranks.
    started[0].store = store  # type: ignore[attr-defined]
    return started


if __name__ == "__main__":
    sys.exit(main())

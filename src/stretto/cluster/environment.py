"""Read and check a launcher's environment variables; errors name the variable."""

import hashlib
import os
from collections.abc import Mapping

from stretto.cluster.world import StoreAddress
from stretto.errors import LaunchError

Environ = Mapping[str, str]

_FIRST_PORT, _NUM_PORTS = 15000, 15000
"""Range of derived store ports. It lies below Linux's ephemeral ports, which start at 32768."""


def read_int(environ: Environ, name: str, default: int | None = None) -> int:
    """Return the integer in ``name``, or ``default`` where it is not set.

    Raises:
        LaunchError: The variable is not an integer, or it is missing and has no default.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise LaunchError(f"{name} is not set although other launcher variables are")
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a whole number: check the launcher") from None


def read_rank_and_size(environ: Environ, rank_name: str, size_name: str) -> tuple[int, int]:
    """Return rank and world size, checked against each other."""
    rank, size = read_int(environ, rank_name), read_int(environ, size_name)
    if not 0 <= rank < size:
        raise LaunchError(
            f"{rank_name}={rank} does not fit {size_name}={size}: check the launcher, or unset "
            "variables that an earlier launcher set"
        )
    return rank, size


def threads_per_rank(local_size: int, environ: Environ | None = None) -> int:
    """Return the CPU threads a rank uses: OMP_NUM_THREADS, or its share of the host's cores."""
    environ = os.environ if environ is None else environ
    requested = environ.get("OMP_NUM_THREADS", "")
    if requested.isdigit() and int(requested) > 0:
        return int(requested)
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def read_interface(environ: Environ) -> str | None:
    """Return the network interface that the user named, or None."""
    return environ.get("STRETTO_INTERFACE") or environ.get("GLOO_SOCKET_IFNAME")


def read_port(environ: Environ, default: int | None = None) -> int:
    """Return MASTER_PORT; port 0 is refused, since all ranks must know the same port."""
    value = read_int(environ, "MASTER_PORT", default)
    if not 0 < value < 1 << 16:
        raise LaunchError(
            f"MASTER_PORT={value} is not a port that ranks can connect to: give 1 to 65535"
        )
    return value


def derive_store_address(environ: Environ, host: str, job: str) -> StoreAddress:
    """Return the address of the store that rank 0 starts where the launcher has none.

    The launcher passes no port, so the port is derived from the job's name. MASTER_ADDR and
    MASTER_PORT override host and port.
    """
    derived = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % _NUM_PORTS
    return StoreAddress(
        environ.get("MASTER_ADDR", host),
        read_port(environ, _FIRST_PORT + derived),
        started_by_rank_0=True,
    )


def disable_torch_nccl_watchdog() -> None:
    """Turn off PyTorch's NCCL watchdog, so that `GpuTimeoutWatchdog` reports lost peers.

    PyTorch's watchdog would end the process first and print only the number of the collective,
    not its name. Variables that the user has set stay as they are.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")

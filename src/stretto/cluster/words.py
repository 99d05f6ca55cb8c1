"""Read a launcher's words in the environment; mistakes name the word."""

import hashlib
import os
from collections.abc import Mapping

from stretto.cluster.world import Meeting
from stretto.errors import LaunchError

Environ = Mapping[str, str]

_FIRST_PORT, _NUM_PORTS = 15000, 15000
"""Below the range from which Linux takes ports for outgoing connections (32768 on)."""


def number(environ: Environ, name: str, default: int | None = None) -> int:
    """Return a whole number that must be there, unless a default is given."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise LaunchError(f"{name} is not set although other launcher variables are")
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a whole number: check the launcher") from None


def rank_and_size(environ: Environ, rank_name: str, size_name: str) -> tuple[int, int]:
    """Return who of how many, checked against each other."""
    rank, size = number(environ, rank_name), number(environ, size_name)
    if not 0 <= rank < size:
        raise LaunchError(
            f"{rank_name}={rank} does not fit {size_name}={size}: check the launcher, or unset "
            "what an earlier one left behind"
        )
    return rank, size


def fair_threads(local_size: int, environ: Environ | None = None) -> int:
    """Return the CPU threads a rank should use: OMP_NUM_THREADS, or its share of the cores."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def interface(environ: Environ) -> str | None:
    """Return the interface a person named."""
    return environ.get("STRETTO_INTERFACE") or environ.get("GLOO_SOCKET_IFNAME")


def port(environ: Environ, default: int | None = None) -> int:
    """Return MASTER_PORT, which must be a real one: all ranks are told the same."""
    told = number(environ, "MASTER_PORT", default)
    if not 0 < told < 1 << 16:
        raise LaunchError(
            f"MASTER_PORT={told} is not a port that ranks can meet at: give 1 to 65535"
        )
    return told


def meeting_of(environ: Environ, host: str, job: str) -> Meeting:
    """Return where ranks meet when no launcher holds a store: rank 0 starts one.

    Nobody tells the ranks a port, so it follows from the job's name; MASTER_ADDR and MASTER_PORT
    override, for whoever has a reason.
    """
    derived = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % _NUM_PORTS
    return Meeting(
        environ.get("MASTER_ADDR", host),
        port(environ, _FIRST_PORT + derived),
        held_by_rank_0=True,
    )

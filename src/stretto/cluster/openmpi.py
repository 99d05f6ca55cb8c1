"""Open MPI's words: mpirun starts the ranks, and its own messages are not used."""

import re
import socket

from stretto.cluster.torchrun import even_mesh
from stretto.cluster.words import (
    Environ,
    fair_threads,
    interface,
    meeting_of,
    number,
    rank_and_size,
)
from stretto.cluster.world import World
from stretto.errors import LaunchError

MARKS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")

_ADDRESS = re.compile(r"tcp4?://([\d.]+)")


def read(environ: Environ) -> World:
    """Return the world that mpirun describes; hosts may have different numbers of ranks."""
    rank, size = rank_and_size(environ, *MARKS)
    local_size = number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    if not 1 <= local_size <= size:
        raise LaunchError(
            f"OMPI_COMM_WORLD_LOCAL_SIZE={local_size} does not fit OMPI_COMM_WORLD_SIZE={size}"
        )
    mpirun = environ.get("OMPI_MCA_orte_hnp_uri", "")
    job = f"openmpi {environ.get('PMIX_NAMESPACE', '')} {mpirun}".strip()
    here = environ.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else _host_of(mpirun))
    return World(
        rank,
        even_mesh(size, local_size),
        meeting=meeting_of(environ, here, job) if size > 1 else None,
        interface=interface(environ),
        threads=fair_threads(local_size, environ),
        launcher="openmpi",
        found_by="OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are set",
        host_name=socket.gethostname(),
        job=job,
    )


def _host_of(mpirun: str) -> str:
    """Return where mpirun is: on rank 0's host, unless it was started on a machine without ranks.

    Then, and where mpirun does not say it (from Open MPI 5 on), a person has to.
    """
    found = _ADDRESS.search(mpirun)
    if found is None:
        raise LaunchError(
            "Open MPI does not say where rank 0 is: give its host to all ranks, as in "
            "mpirun -x MASTER_ADDR=HOST"
        )
    return found[1]

"""torchrun's words (static and c10d rendezvous), which our own launcher and the lab use too."""

import socket

from stretto.cluster.words import Environ, fair_threads, interface, number, port, rank_and_size
from stretto.cluster.world import Meeting, Mesh, World
from stretto.errors import LaunchError

MARKS = ("RANK", "WORLD_SIZE")


def read(environ: Environ) -> World:
    """Return the world that torchrun describes."""
    rank, size = rank_and_size(environ, "RANK", "WORLD_SIZE")
    local_size = number(environ, "LOCAL_WORLD_SIZE", size)
    if not 1 <= local_size <= size:
        raise LaunchError(
            f"LOCAL_WORLD_SIZE={local_size} does not fit WORLD_SIZE={size}: check the launcher"
        )
    return World(
        rank,
        even_mesh(size, local_size),
        meeting=_meeting(environ),
        interface=interface(environ),
        threads=fair_threads(local_size, environ),
        link_bits_per_s=number(environ, "STRETTO_LAB_BITS_PER_S", 0) or None,
        generation=number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        launcher=environ.get("STRETTO_LAUNCHER", "torchrun"),
        found_by="RANK and WORLD_SIZE are set",
        host_name=f"{socket.gethostname()}/{environ.get('GROUP_RANK', '')}",
        job=environ.get("TORCHELASTIC_RUN_ID", ""),
    )


def even_mesh(size: int, local_size: int) -> Mesh:
    """Return a first guess from one host's number of ranks; the ranks' meeting settles it."""
    hosts, rest = divmod(size, local_size)
    return Mesh((local_size,) * hosts + ((rest,) if rest else ()))


def _meeting(environ: Environ) -> Meeting:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise LaunchError(
            f"RANK and WORLD_SIZE are set but not {' and '.join(missing)}: start with "
            "`stretto train --workers N` or torchrun, or unset them to run alone"
        )
    agent_holds = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Meeting(environ["MASTER_ADDR"], port(environ), held_by_rank_0=not agent_holds)

"""Find the `World` in what the launcher left in the environment: torchrun's words, or nothing."""

import os
from collections.abc import Mapping

from stretto.cluster.world import Meeting, Mesh, World
from stretto.errors import LaunchError


def detect(environ: Mapping[str, str] | None = None) -> World:
    """Return who this process is; alone unless a launcher said otherwise.

    Raises:
        LaunchError: The variables are incomplete or contradict one another; it says which.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return World(0, Mesh((1,)), threads=fair_threads(1, environ))
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size)
    if not 0 <= rank < size:
        raise LaunchError(f"RANK={rank} does not fit WORLD_SIZE={size}: check the launcher")
    if local_size < 1 or size % local_size:
        raise LaunchError(
            f"WORLD_SIZE={size} is not a multiple of LOCAL_WORLD_SIZE={local_size}: "
            "every host must start the same number of ranks"
        )
    return World(
        rank,
        Mesh((local_size,) * (size // local_size)),
        meeting=_meeting(environ),
        interface=environ.get("STRETTO_INTERFACE") or environ.get("GLOO_SOCKET_IFNAME"),
        threads=fair_threads(local_size, environ),
        link_bits_per_s=_number(environ, "STRETTO_LAB_BITS_PER_S", 0) or None,
        generation=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        launcher=environ.get("STRETTO_LAUNCHER", "torchrun"),
    )


def fair_threads(local_size: int, environ: Mapping[str, str] | None = None) -> int:
    """Return the CPU threads a rank should use: OMP_NUM_THREADS, or its share of the cores."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def _meeting(environ: Mapping[str, str]) -> Meeting:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise LaunchError(
            f"RANK and WORLD_SIZE are set but not {' and '.join(missing)}: start with "
            "`stretto train --workers N` or torchrun, or unset them to run alone"
        )
    agent_holds = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = _number(environ, "MASTER_PORT")
    return Meeting(environ["MASTER_ADDR"], port, held_by_rank_0=not agent_holds)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise LaunchError(f"{name} is not set although other launcher variables are")
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a whole number: check the launcher") from None

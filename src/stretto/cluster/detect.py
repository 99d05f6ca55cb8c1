"""Find the `World` in the environment variables of the launcher: torchrun, Open MPI or Slurm.

Each launcher is recognised by its variables. One launcher may run inside another, such as torchrun
in a Slurm job or mpirun through srun. The inner one started this process, so `LAUNCHERS` lists the
inner ones first.
"""

import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from stretto.cluster.environment import (
    Environ,
    derive_store_address,
    read_int,
    read_interface,
    read_port,
    read_rank_and_size,
    threads_per_rank,
)
from stretto.cluster.world import Mesh, StoreAddress, World
from stretto.errors import LaunchError

# --- torchrun (static and c10d rendezvous); stretto's own launcher and the lab set the same ---

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE")


def read_torchrun(environ: Environ) -> World:
    """Return the world that torchrun's variables describe."""
    rank, size = read_rank_and_size(environ, "RANK", "WORLD_SIZE")
    local_size = read_int(environ, "LOCAL_WORLD_SIZE", size)
    if not 1 <= local_size <= size:
        raise LaunchError(
            f"LOCAL_WORLD_SIZE={local_size} does not fit WORLD_SIZE={size}: check the launcher"
        )
    return World(
        rank,
        even_mesh(size, local_size),
        store_address=_torchrun_store_address(environ),
        interface=read_interface(environ),
        threads=threads_per_rank(local_size, environ),
        link_bits_per_s=read_int(environ, "STRETTO_LAB_BITS_PER_S", 0) or None,
        generation=read_int(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        launcher=environ.get("STRETTO_LAUNCHER", "torchrun"),
        detected_from="RANK and WORLD_SIZE are set",
        host_name=f"{socket.gethostname()}/{environ.get('GROUP_RANK', '')}",
        job=environ.get("TORCHELASTIC_RUN_ID", ""),
    )


def even_mesh(size: int, local_size: int) -> Mesh:
    """Return a mesh that assumes ``local_size`` ranks on every host; the last host takes the rest.

    This is a first guess: `stretto.cluster.rendezvous` replaces it by the real mesh.
    """
    hosts, rest = divmod(size, local_size)
    return Mesh((local_size,) * hosts + ((rest,) if rest else ()))


def _torchrun_store_address(environ: Environ) -> StoreAddress:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise LaunchError(
            f"RANK and WORLD_SIZE are set but not {' and '.join(missing)}: start with "
            "`stretto train --workers N` or torchrun, or unset them to run alone"
        )
    agent_serves_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return StoreAddress(
        environ["MASTER_ADDR"], read_port(environ), started_by_rank_0=not agent_serves_store
    )


# --- Slurm: ranks are the tasks of one job step, started by srun ---

SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_ID")
"""Both must be set. A batch script itself has only the first: it is not a rank."""

_NODELIST_BRACKETS = re.compile(r"\[([^\],-]+)[^\]]*\]")
_TASK_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def read_slurm(environ: Environ) -> World:
    """Return the world of a Slurm job step; a step of one task is a world of one rank."""
    rank, size = read_rank_and_size(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    mesh = Mesh(parse_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size))))
    if mesh.size != size:
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} are {mesh.size} "
            f"tasks, but SLURM_STEP_NUM_TASKS={size}: unset the variables of an outer job"
        )
    job_id, step = environ.get("SLURM_JOB_ID", "?"), environ["SLURM_STEP_ID"]
    restarts = read_int(environ, "SLURM_RESTART_COUNT", 0)
    job = f"slurm {job_id}.{step} restart {restarts}"
    host = first_node(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    return World(
        rank,
        mesh,
        store_address=derive_store_address(environ, host, job) if size > 1 else None,
        interface=read_interface(environ),
        threads=_slurm_threads(environ, mesh, rank),
        generation=restarts,
        launcher="slurm",
        detected_from=f"SLURM_PROCID and SLURM_STEP_ID are set (job {job_id}, step {step})",
        host_name=environ.get("SLURMD_NODENAME", ""),
        job=job,
        restart_command=("scontrol", "requeue", job_id) if _is_batch_step(environ) else (),
    )


def parse_tasks_per_node(text: str) -> tuple[int, ...]:
    """Return ``2(x3),1`` as (2, 2, 2, 1)."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASK_COUNT.fullmatch(part)
        if match is None:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of counts such as 2(x3),1"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def first_node(nodelist: str) -> str:
    """Return the first host of a list such as ``n[1-2,7],gpu[003-005]``."""
    depth, end = 0, len(nodelist)
    for index, letter in enumerate(nodelist):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            end = index
            break
    return _NODELIST_BRACKETS.sub(r"\1", nodelist[:end])


def _is_batch_step(environ: Environ) -> bool:
    """Return whether this is a step of a batch job; Slurm requeues only batch jobs.

    A batch script passes ENVIRONMENT=BATCH on to its steps. sbatch --export drops it and sets
    SLURM_GET_USER_ENV instead. After srun --export neither is set; the user then restarts with
    `--resume`.
    """
    return environ.get("ENVIRONMENT") == "BATCH" or "SLURM_GET_USER_ENV" in environ


def _slurm_threads(environ: Environ, mesh: Mesh, rank: int) -> int:
    """Return the CPU threads from --cpus-per-task, or else the rank's share of the cores."""
    requested = read_int(environ, "SLURM_CPUS_PER_TASK", 0)
    if requested and "OMP_NUM_THREADS" not in environ:
        return requested
    return threads_per_rank(mesh.ranks_per_host[mesh.host_of(rank)], environ)


# --- Open MPI: mpirun starts the ranks; MPI messages are not used ---

OPENMPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")

_MPIRUN_ADDRESS = re.compile(r"tcp4?://([\d.]+)")


def read_openmpi(environ: Environ) -> World:
    """Return the world that mpirun describes; hosts may have different numbers of ranks."""
    rank, size = read_rank_and_size(environ, *OPENMPI_VARIABLES)
    local_size = read_int(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    if not 1 <= local_size <= size:
        raise LaunchError(
            f"OMPI_COMM_WORLD_LOCAL_SIZE={local_size} does not fit OMPI_COMM_WORLD_SIZE={size}"
        )
    mpirun_uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    job = f"openmpi {environ.get('PMIX_NAMESPACE', '')} {mpirun_uri}".strip()
    store_host = environ.get("MASTER_ADDR") or (
        "127.0.0.1" if local_size == size else _mpirun_host(mpirun_uri)
    )
    return World(
        rank,
        even_mesh(size, local_size),
        store_address=derive_store_address(environ, store_host, job) if size > 1 else None,
        interface=read_interface(environ),
        threads=threads_per_rank(local_size, environ),
        launcher="openmpi",
        detected_from="OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are set",
        host_name=socket.gethostname(),
        job=job,
    )


def _mpirun_host(mpirun_uri: str) -> str:
    """Return the address of the host that runs mpirun, which normally is rank 0's host.

    Where mpirun runs on a machine without ranks, the user must set MASTER_ADDR.

    Raises:
        LaunchError: mpirun does not give its address (Open MPI 5 and later).
    """
    found = _MPIRUN_ADDRESS.search(mpirun_uri)
    if found is None:
        raise LaunchError(
            "Open MPI does not give the host of rank 0: pass it to all ranks, as in "
            "mpirun -x MASTER_ADDR=HOST"
        )
    return found[1]


# --- Detection ---


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher: the environment variables that identify it, and the function that reads them."""

    name: str
    variables: tuple[str, ...]
    read: Callable[[Environ], World]


LAUNCHERS = (
    Launcher("torchrun", TORCHRUN_VARIABLES, read_torchrun),
    Launcher("openmpi", OPENMPI_VARIABLES, read_openmpi),
    Launcher("slurm", SLURM_VARIABLES, read_slurm),
)


def detect_world(environ: Environ | None = None) -> World:
    """Return the world of this process; a world of one rank where no launcher is found.

    Raises:
        LaunchError: The variables are incomplete or contradict one another; it names them.
    """
    environ = os.environ if environ is None else environ
    present = _present_launchers(environ)
    if not present:
        return World(0, Mesh((1,)), threads=threads_per_rank(1, environ))
    return present[0].read(environ)


def describe_detection(environ: Environ | None = None) -> str:
    """Return a line that names the launcher, the variables it was found by, and outer launchers."""
    environ = os.environ if environ is None else environ
    world = detect_world(environ)
    outer = [launcher.name for launcher in _present_launchers(environ)[1:]]
    inside = f"; inside {' inside '.join(outer)}" if outer else ""
    return f"{world.launcher}: {world.detected_from}{inside}"


def _present_launchers(environ: Environ) -> list[Launcher]:
    """Return the launchers whose variables are set, innermost first."""

    def is_present(launcher: Launcher) -> bool:
        # One of torchrun's variables is enough: the reader then reports the missing one.
        # The other launchers need all of theirs, because an outer job may set some of them.
        all_or_any = any if launcher.name == "torchrun" else all
        return all_or_any(variable in environ for variable in launcher.variables)

    return [launcher for launcher in LAUNCHERS if is_present(launcher)]

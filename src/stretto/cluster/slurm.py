"""Slurm's words: ranks are the tasks of one job step, started by srun."""

import re

from stretto.cluster.words import (
    Environ,
    fair_threads,
    interface,
    meeting_of,
    number,
    rank_and_size,
)
from stretto.cluster.world import Mesh, World
from stretto.errors import LaunchError

MARKS = ("SLURM_PROCID", "SLURM_STEP_ID")
"""A batch script has the first but not the second: it is no rank, whatever it starts may be."""

_BRACKETS = re.compile(r"\[([^\],-]+)[^\]]*\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def read(environ: Environ) -> World:
    """Return the world of a job step; a step of one task is a world of its own."""
    rank, size = rank_and_size(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    mesh = Mesh(tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size))))
    if mesh.size != size:
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} are {mesh.size} "
            f"tasks, but SLURM_STEP_NUM_TASKS={size}: unset what an outer job left behind"
        )
    number_of_job, step = environ.get("SLURM_JOB_ID", "?"), environ["SLURM_STEP_ID"]
    restarts = number(environ, "SLURM_RESTART_COUNT", 0)
    job = f"slurm {number_of_job}.{step} restart {restarts}"
    host = first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    return World(
        rank,
        mesh,
        meeting=meeting_of(environ, host, job) if size > 1 else None,
        interface=interface(environ),
        threads=_threads(environ, mesh, rank),
        generation=restarts,
        launcher="slurm",
        found_by=f"SLURM_PROCID and SLURM_STEP_ID are set (job {number_of_job}, step {step})",
        host_name=environ.get("SLURMD_NODENAME", ""),
        job=job,
        ask_restart=("scontrol", "requeue", number_of_job) if _is_batch(environ) else (),
    )


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Return ``2(x3),1`` as (2, 2, 2, 1)."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of counts such as 2(x3),1"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def first_host(nodelist: str) -> str:
    """Return the first name of a list such as ``n[1-2,7],gpu[003-005]``."""
    depth, end = 0, len(nodelist)
    for place, letter in enumerate(nodelist):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            end = place
            break
    return _BRACKETS.sub(r"\1", nodelist[:end])


def _is_batch(environ: Environ) -> bool:
    """Say whether this is a step of a batch job; Slurm queues no other again.

    A batch script passes ENVIRONMENT=BATCH on to its steps. sbatch --export drops it and leaves
    SLURM_GET_USER_ENV instead; behind srun --export nothing tells, and `--resume` is the advice.
    """
    return environ.get("ENVIRONMENT") == "BATCH" or "SLURM_GET_USER_ENV" in environ


def _threads(environ: Environ, mesh: Mesh, rank: int) -> int:
    """Return what --cpus-per-task gave, or a fair share."""
    asked = number(environ, "SLURM_CPUS_PER_TASK", 0)
    if asked and "OMP_NUM_THREADS" not in environ:
        return asked
    return fair_threads(mesh.ranks_per_host[mesh.host_of(rank)], environ)

"""Find the `World` in what the launcher left in the environment.

A launcher is known by its words. One may run inside another (torchrun in a Slurm job, mpirun
through srun), and then the inner one started us: the table goes from the inside outwards.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from stretto.cluster import openmpi, slurm, torchrun
from stretto.cluster.words import Environ, fair_threads
from stretto.cluster.world import Mesh, World


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to be started: the words that show it, and how they are read."""

    name: str
    marks: tuple[str, ...]
    read: Callable[[Environ], World]


LAUNCHERS = (
    Launcher("torchrun", torchrun.MARKS, torchrun.read),
    Launcher("openmpi", openmpi.MARKS, openmpi.read),
    Launcher("slurm", slurm.MARKS, slurm.read),
)


def detect(environ: Environ | None = None) -> World:
    """Return who this process is; alone unless a launcher said otherwise.

    Raises:
        LaunchError: The variables are incomplete or contradict one another; it says which.
    """
    environ = os.environ if environ is None else environ
    found = _found(environ)
    if not found:
        return World(0, Mesh((1,)), threads=fair_threads(1, environ))
    return found[0].read(environ)


def explain(environ: Environ | None = None) -> str:
    """Say which launcher was found and why, and which words of others were left aside."""
    environ = os.environ if environ is None else environ
    world = detect(environ)
    outer = [launcher.name for launcher in _found(environ)[1:]]
    inside = f"; inside {' inside '.join(outer)}" if outer else ""
    return f"{world.launcher}: {world.found_by}{inside}"


def _found(environ: Environ) -> list[Launcher]:
    """Return the launchers whose words are there, the innermost first."""

    def speaks(launcher: Launcher) -> bool:
        # Any of torchrun's two words is meant for us; of the others' it takes all.
        enough = any if launcher.name == "torchrun" else all
        return enough(mark in environ for mark in launcher.marks)

    return [launcher for launcher in LAUNCHERS if speaks(launcher)]

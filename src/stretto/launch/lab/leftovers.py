"""Find and clear what labs left that were killed before they could clear up themselves."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from stretto.errors import LabError
from stretto.launch.lab.locks import forget, locked_ids, taken_over
from stretto.launch.lab.plan import lab_of
from stretto.launch.lab.shell import run_tool

_DEATH_TIMEOUT_S = 10.0


def clear_leftovers(folder: Path) -> tuple[str, ...]:
    """Remove everything of every dead lab and return their ids; a live lab is never touched.

    Namespaces hold all that a lab makes (links, addresses, processes), so they and the lock files
    are all there is to look for.
    """
    seen = {lab for lab in map(lab_of, _namespaces()) if lab} | locked_ids(folder)
    cleared = []
    for lab_id in sorted(seen):
        with taken_over(folder, lab_id) as is_dead:
            if is_dead:
                clear(lab_id)
                forget(folder, lab_id)
                cleared.append(lab_id)
    return tuple(cleared)


def clear(lab_id: str) -> None:
    """End all processes of a lab and remove its namespaces; the caller holds its lock."""
    own = [namespace for namespace in _namespaces() if lab_of(namespace) == lab_id]
    for namespace in own:
        _end_processes(namespace)
    for namespace in own:
        run_tool(("ip", "netns", "del", namespace))


def _namespaces() -> list[str]:
    # A line is a name, or "name (id: 3)".
    return [line.split()[0] for line in run_tool(("ip", "netns", "list")).splitlines() if line]


def _end_processes(namespace: str) -> None:
    """Kill until none is left: one that forks may add another while we look."""
    deadline_s = time.monotonic() + _DEATH_TIMEOUT_S
    while pids := run_tool(("ip", "netns", "pids", namespace)).split():
        if time.monotonic() > deadline_s:
            raise LabError(
                f"processes {', '.join(pids)} in namespace {namespace} do not die of KILL within "
                f"{_DEATH_TIMEOUT_S:g} s; look what they wait for in /proc/PID/wchan"
            )
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

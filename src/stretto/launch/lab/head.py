"""The head of a lab: the store's process, in a namespace of its own."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.errors import LabError
from stretto.launch.lab.box import Box
from stretto.launch.lab.plan import HEAD, address
from stretto.launch.processes import Bell, guarded, tail

START_TIMEOUT_S = 120.0
"""Importing torch takes seconds, and tens of them on a machine that does much else."""

StoreCommand = Callable[[str], list[str]]
"""Address -> command that listens there, prints its port as one line, and ends with its stdin."""


def store_command(host: str) -> list[str]:
    """Return the command of our own store."""
    return [sys.executable, "-m", "stretto.cluster.serve", "--host", host, "--port", "0"]


@contextmanager
def serving(box: Box, command: StoreCommand, *, log: Path, bell: Bell) -> Iterator[int | None]:
    """Run the store on the head; yield its port, or None when a signal came first."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            guarded(box.command_in(HEAD, command(address(HEAD)))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    with process:
        try:
            yield _await_port(process, bell, log)
        finally:
            # It holds nothing worth saving, and the ranks are gone.
            process.kill()


def _await_port(process: subprocess.Popen[bytes], bell: Bell, log: Path) -> int | None:
    assert process.stdout is not None
    deadline_s = time.monotonic() + START_TIMEOUT_S
    ready: list[int] = []
    while not ready and not bell.received:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LabError(
                f"the lab's store does not listen after {START_TIMEOUT_S:g} s; see {log}"
            )
        ready = bell.wait(left_s, readable=[process.stdout.fileno()])
    if bell.received:
        return None
    line = process.stdout.readline().strip()
    if not line.isdigit():
        raise LabError(f"the lab's store did not start; the end of {log}:\n{tail(log)}")
    return int(line)

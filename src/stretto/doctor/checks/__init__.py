"""Every check: a pure function from what all ranks saw to one line."""

from collections.abc import Callable

from stretto.doctor.checks.agreement import clock, code, launcher, mesh, time_outs
from stretto.doctor.checks.folder import disk, folder
from stretto.doctor.checks.machine import (
    file_limit,
    hardware,
    shared_memory,
    threads,
    torch_build,
)
from stretto.doctor.checks.network import interfaces, peers, ports, roll_call
from stretto.doctor.records import Examination, Finding

CHECKS: tuple[Callable[[Examination], Finding], ...] = (
    hardware,
    torch_build,
    code,
    launcher,
    roll_call,
    mesh,
    interfaces,
    peers,
    ports,
    disk,
    folder,
    clock,
    file_limit,
    shared_memory,
    threads,
    time_outs,
)
"""In the order they are told."""


def judge(seen: Examination) -> list[Finding]:
    """Return what every check says, one finding each."""
    return [check(seen) for check in CHECKS]

"""Run a command as every rank of a lab, and sum up what the hosts sent."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import ConfigError
from stretto.launch.lab.box import Box, HostBytes, open_box
from stretto.launch.lab.environment import cores_of, rank_environment, threads_per_rank
from stretto.launch.lab.head import StoreCommand, serving, store_command
from stretto.launch.lab.plan import LabSpec, host_of
from stretto.launch.processes import Worker, listening
from stretto.launch.watch import run_workers


@dataclass(frozen=True, slots=True)
class LabResult:
    """How a run in a lab ended, and what it moved."""

    exit_code: int
    seconds: float
    """From the start of the ranks to the end of the last."""
    hosts: tuple[HostBytes, ...]
    logs: Path
    """Folder with ``head.log`` and ``rank-N.log`` of every rank but 0, whose output is ours."""
    failed_rank: int | None = None
    reason: str = ""


def run_in_lab(
    spec: LabSpec,
    command: Sequence[str],
    *,
    say: Callable[[str], None],
    store: StoreCommand = store_command,
) -> LabResult:
    """Build a lab, run ``command`` as each of its ranks, take the lab down, tell what happened.

    INT, TERM, HUP, USR1 and USR2 end the ranks and the lab in good order. Main thread only.

    Raises:
        ConfigError: there is no such command.
        LabError: the lab cannot be built here.
    """
    _require_command(command)
    logs = Path(tempfile.mkdtemp(prefix="stretto-lab-"))
    with (
        listening() as bell,
        open_box(spec, say=say) as box,
        serving(box, store, log=logs / "head.log", bell=bell) as port,
    ):
        # Without a port a signal has come, and no worker will be started.
        workers = _workers(box, command, logs=logs, store_port=port or 0)
        say(f"lab {box.names.lab_id}: {_describe(spec)}; logs of ranks in {logs}")
        began_s = time.monotonic()
        outcome = run_workers(workers, say=say, bell=bell)
        return LabResult(
            exit_code=outcome.exit_code,
            seconds=time.monotonic() - began_s,
            hosts=box.counters(),
            logs=logs,
            failed_rank=outcome.failed_rank,
            reason=outcome.reason,
        )


def _require_command(command: Sequence[str]) -> None:
    if not command:
        raise ConfigError("a lab needs a command to run as each rank; write it after --")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"no program {command[0]!r} on PATH to run as each rank of the lab")


def _workers(box: Box, command: Sequence[str], *, logs: Path, store_port: int) -> list[Worker]:
    spec = box.spec
    cores = sorted(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(threads_per_rank(spec, len(cores))),
        # torch warns that namespaces have no name server.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    return [
        Worker(
            rank=rank,
            argv=box.command_in(
                host_of(spec, rank), [*_pinned(cores_of(spec, rank, cores)), *command]
            ),
            env={**unset, **rank_environment(spec, box.names, rank, store_port=store_port)},
            log=logs / f"rank-{rank}.log" if rank else None,
            place=f"host {host_of(spec, rank)}",
        )
        for rank in range(spec.ranks)
    ]


def _pinned(cores: Sequence[int]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, cores))]


def _describe(spec: LabSpec) -> str:
    rate = (
        "links unshaped"
        if spec.bits_per_s is None
        else f"links of {spec.bits_per_s / 1e6:g} Mbit/s"
    )
    loss = f", {spec.loss:.3%} of packets lost" if spec.loss else ""
    return f"{spec.hosts} hosts x {spec.ranks_per_host} ranks, {rate}{loss}"

"""Run a command as every rank of a lab, and report the traffic of each host."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import ConfigError, LabError
from stretto.lab.namespaces import HostBytes, RunningLab, open_lab
from stretto.lab.spec import HEAD, LabNames, LabSpec, address, host_of
from stretto.launch.supervise import run_workers
from stretto.launch.worker_group import (
    SignalWaiter,
    WorkerSpec,
    catch_signals,
    read_tail,
    with_parent_death_signal,
)


def rank_environment(
    spec: LabSpec, names: LabNames, rank: int, *, store_port: int
) -> Mapping[str, str]:
    """Return the environment variables of a rank: torchrun's, and a few for labs."""
    variables: dict[str, object] = {
        "RANK": rank,
        "WORLD_SIZE": spec.ranks,
        "LOCAL_RANK": rank % spec.ranks_per_host,
        "LOCAL_WORLD_SIZE": spec.ranks_per_host,
        "GROUP_RANK": host_of(spec, rank),
        "GROUP_WORLD_SIZE": spec.hosts,
        "MASTER_ADDR": address(HEAD),
        "MASTER_PORT": store_port,
        # The head holds the store: rank 0 connects like all others instead of opening one.
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "GLOO_SOCKET_IFNAME": names.link,
        "STRETTO_LAUNCHER": "stretto lab",
    }
    if spec.bits_per_s is not None:
        variables["STRETTO_LAB_BITS_PER_S"] = spec.bits_per_s
    return {name: str(value) for name, value in variables.items()}


def cores_of(spec: LabSpec, rank: int, cores: Sequence[int]) -> Sequence[int]:
    """Return the cores to which a rank is pinned, so that hosts do not share cores.

    If the kernel decides, three of four ranks may share one of two cores for a while. One host
    would then seem slow.
    """
    cores_per_rank = len(cores) // spec.ranks
    return (
        cores[rank * cores_per_rank : (rank + 1) * cores_per_rank]
        if cores_per_rank
        else [cores[rank % len(cores)]]
    )


def threads_per_rank(spec: LabSpec, cores: int) -> int:
    """Return the threads of each rank: an even share of the machine's cores, at least one."""
    return max(1, cores // spec.ranks)


START_TIMEOUT_S = 120.0
"""Importing torch takes seconds, and tens of seconds on a busy machine."""

StoreCommand = Callable[[str], list[str]]
"""Address -> command that listens there, prints its port on one line, and ends with its stdin."""


def store_command(host: str) -> list[str]:
    """Return the command that serves stretto's own store."""
    return [sys.executable, "-m", "stretto.cluster.store", "--host", host, "--port", "0"]


@contextmanager
def serve_store(
    lab: RunningLab, command: StoreCommand, *, log: Path, signals: SignalWaiter
) -> Iterator[int | None]:
    """Run the store on the head node; yield its port, or None if a signal arrived first."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            with_parent_death_signal(lab.command_in(HEAD, command(address(HEAD)))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    with process:
        try:
            yield _await_port(process, signals, log)
        finally:
            # The store holds nothing worth saving, and the ranks have ended.
            process.kill()


def _await_port(process: subprocess.Popen[bytes], signals: SignalWaiter, log: Path) -> int | None:
    assert process.stdout is not None
    deadline_s = time.monotonic() + START_TIMEOUT_S
    ready: list[int] = []
    while not ready and not signals.received:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LabError(
                f"the lab's store does not listen after {START_TIMEOUT_S:g} s; see {log}"
            )
        ready = signals.wait(left_s, readable=[process.stdout.fileno()])
    if signals.received:
        return None
    line = process.stdout.readline().strip()
    if not line.isdigit():
        raise LabError(f"the lab's store did not start; the end of {log}:\n{read_tail(log)}")
    return int(line)


@dataclass(frozen=True, slots=True)
class LabResult:
    """How a run in a lab ended, and the bytes that its hosts sent."""

    exit_code: int
    seconds: float
    """From the start of the ranks to the end of the last one."""
    hosts: tuple[HostBytes, ...]
    logs: Path
    """Folder with ``head.log``, and ``rank-N.log`` of every rank but 0 (it writes to our
    output).
    """
    failed_rank: int | None = None
    reason: str = ""


def run_in_lab(
    spec: LabSpec,
    command: Sequence[str],
    *,
    log_line: Callable[[str], None],
    store: StoreCommand = store_command,
) -> LabResult:
    """Build a lab, run ``command`` as each of its ranks, remove the lab and return the result.

    INT, TERM, HUP, USR1 and USR2 end the ranks and the lab in good order. Main thread only.

    Raises:
        ConfigError: There is no such command.
        LabError: The lab cannot be built on this machine.
    """
    _require_command(command)
    logs = Path(tempfile.mkdtemp(prefix="stretto-lab-"))
    with (
        catch_signals() as signals,
        open_lab(spec, log_line=log_line) as lab,
        serve_store(lab, store, log=logs / "head.log", signals=signals) as port,
    ):
        # Without a port a signal has arrived, and `run_workers` will start no worker.
        workers = _workers(lab, command, logs=logs, store_port=port or 0)
        log_line(f"lab {lab.names.lab_id}: {_describe(spec)}; logs of ranks in {logs}")
        began_s = time.monotonic()
        outcome = run_workers(workers, log_line=log_line, signals=signals)
        return LabResult(
            exit_code=outcome.exit_code,
            seconds=time.monotonic() - began_s,
            hosts=lab.counters(),
            logs=logs,
            failed_rank=outcome.failed_rank,
            reason=outcome.reason,
        )


def _require_command(command: Sequence[str]) -> None:
    if not command:
        raise ConfigError("a lab needs a command to run as each rank; write it after --")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"no program {command[0]!r} on PATH to run as each rank of the lab")


def _workers(
    lab: RunningLab, command: Sequence[str], *, logs: Path, store_port: int
) -> list[WorkerSpec]:
    spec = lab.spec
    cores = sorted(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(threads_per_rank(spec, len(cores))),
        # torch warns that namespaces have no name server.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    return [
        WorkerSpec(
            rank=rank,
            argv=lab.command_in(
                host_of(spec, rank), [*_pin_command(cores_of(spec, rank, cores)), *command]
            ),
            env={**unset, **rank_environment(spec, lab.names, rank, store_port=store_port)},
            log=logs / f"rank-{rank}.log" if rank else None,
            location=f"host {host_of(spec, rank)}",
        )
        for rank in range(spec.ranks)
    ]


def _pin_command(cores: Sequence[int]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, cores))]


def _describe(spec: LabSpec) -> str:
    rate = (
        "links unshaped"
        if spec.bits_per_s is None
        else f"links of {spec.bits_per_s / 1e6:g} Mbit/s"
    )
    loss = f", {spec.loss:.3%} of packets lost" if spec.loss else ""
    return f"{spec.hosts} hosts x {spec.ranks_per_host} ranks, {rate}{loss}"

"""What a batch job consists of, and the sbatch file that says so: text from values, no effects.

The ranks find one another in the variables that srun sets, so the file names no address, no
interface and no fabric. Slurm signals the ranks before the time limit; they save and end with
`STOPPED_EXIT_CODE`, and the file then asks for the job to be queued again.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import STOPPED_EXIT_CODE, ConfigError

_UNFIT_FOR_SLURM = re.compile(r"[\\\x00-\x1f\x7f]")
"""Slurm takes a backslash in a log's path for a word to itself, a line break ends an option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A batch job: what each rank runs, where, and what it asks of the cluster."""

    name: str
    command: tuple[str, ...]
    """What each rank runs; see `rank_command`."""
    folder: Path
    """Where it runs, absolute."""
    logs: Path
    """Where its logs go, absolute; Slurm writes nothing, and says nothing, where it is missing."""
    nodes: int
    tasks_per_node: int
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    time: str | None = None
    """Limit in Slurm's words, as 12:00:00; the partition's own when None."""
    partition: str | None = None
    account: str | None = None
    warn_s: int = 120
    """How long before the limit the ranks are told to save."""
    setup: str = ""
    """Shell lines that run first, as they stand."""

    def __post_init__(self) -> None:
        """Refuse what Slurm would refuse later, or would read as something else."""
        counts = {
            "--nodes": self.nodes,
            "--tasks-per-node": self.tasks_per_node,
            "--gpus-per-node": self.gpus_per_node,
            "--warn": self.warn_s,
        }
        for option, count in counts.items():
            if count is not None and count < 1:
                raise ConfigError(f"{option} {count}: expected 1 or more")
        words = {"--time": self.time, "--partition": self.partition, "--account": self.account}
        for option, word in words.items():
            if word is not None and not re.fullmatch(r"[\w.,:@/+-]+", word):
                raise ConfigError(f"{option} {word!r}: expected one word as Slurm knows it")
        if _UNFIT_FOR_SLURM.search(str(self.logs)):
            raise ConfigError(
                f"folder {str(self.logs)!r}: Slurm cannot write logs to a path with a backslash or "
                "a control character; choose another run.folder"
            )


def rank_command(
    arguments: Sequence[str], *, python: Path, container: str | None = None, gpus: bool = False
) -> tuple[str, ...]:
    """Return what each rank runs: ``stretto ARGUMENTS`` of this environment, or of a container.

    ``gpus`` brings the host's driver into the container.
    """
    if container is None:
        return (str(python), "-m", "stretto", *arguments)
    driver = ("--nv",) if gpus else ()
    return ("apptainer", "exec", *driver, container, "stretto", *arguments)


def sbatch_text(spec: JobSpec) -> str:
    """Return the sbatch file of a job."""
    head = [f"#SBATCH {option:<26}  # {why}" for option, why in _options(spec)]
    return "\n".join(["#!/bin/bash", *head, "", *_body(spec), ""])


def _options(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield what sbatch is asked for, each with a reason."""
    yield f"--job-name={spec.name}", "the run"
    yield f"--nodes={spec.nodes}", "hosts"
    yield f"--ntasks-per-node={spec.tasks_per_node}", "ranks on each of them"
    if spec.cpus_per_task is not None:
        yield f"--cpus-per-task={spec.cpus_per_task}", "run.threads"
    if spec.gpus_per_node is not None:
        yield f"--gpus-per-node={spec.gpus_per_node}", "accelerators on each host"
    if spec.time is not None:
        yield f"--time={spec.time}", "the limit of one start; a longer run is queued again"
    if spec.partition is not None:
        yield f"--partition={spec.partition}", "where it may run"
    if spec.account is not None:
        yield f"--account={spec.account}", "who pays"
    yield f"--signal=USR1@{spec.warn_s}", "so many seconds before the limit, told to the ranks"
    yield "--requeue", "may be queued again: preempted, a node lost, or at the limit"
    yield "--open-mode=append", "a later start adds to the logs of an earlier one"
    yield f"--output={_log(spec.logs, 'slurm-%j.log')}", "what this file says"


def _body(spec: JobSpec) -> Iterator[str]:
    yield "# A preemption may signal this shell too: it outlives the ranks, to hear how they end."
    yield "trap : TERM USR1 USR2"
    yield f"cd {shlex.quote(str(spec.folder))} || exit 1"
    if spec.setup:
        yield spec.setup
    yield ""
    yield from _srun(spec)
    yield "code=$?"
    yield ""
    yield f"# {STOPPED_EXIT_CODE}: asked to stop, everything saved. The next start goes on there."
    yield f'if [ "$code" -eq {STOPPED_EXIT_CODE} ]; then'
    yield '  scontrol requeue "$SLURM_JOB_ID" && exit 0'
    yield '  echo "stretto: saved, but scontrol could not queue the job again" >&2'
    yield "fi"
    yield 'exit "$code"'


def _srun(spec: JobSpec) -> Iterator[str]:
    """Yield the lines that start the ranks; the first to fail ends the others."""
    yield "srun --kill-on-bad-exit=1 --distribution=block \\"  # numbered host after host
    if spec.cpus_per_task is not None:  # since Slurm 22.05 srun does not take it over from sbatch
        yield f"  --cpus-per-task={spec.cpus_per_task} \\"
    yield f"  --output={_log(spec.logs, 'slurm-%j-rank-%t.log')} --open-mode=append \\"
    yield f"  {shlex.join(spec.command)}"


def _log(folder: Path, pattern: str) -> str:
    """Return a log's path as Slurm reads it: a percent sign of the folder is doubled."""
    return shlex.quote(f"{folder}/".replace("%", "%%") + pattern)

"""What a batch job consists of, and the sbatch file that says so: text from values, no effects.

The ranks find one another in the variables that srun sets, so the file names no address, no
interface and no fabric. Slurm signals the ranks before the time limit; they save and end with
`STOPPED_EXIT_CODE`, and the file then asks for the job to be queued again, unless it was cancelled.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import STOPPED_EXIT_CODE, ConfigError

_UNFIT_FOR_SLURM = re.compile(r"[\\\x00-\x1f\x7f]")
"""Slurm takes a backslash in a log's path for a word to itself, a line break ends an option."""

_LIMITS_S: Mapping[str, tuple[int, ...]] = {
    "MM": (60,),
    "MM:SS": (60, 1),
    "HH:MM:SS": (3600, 60, 1),
    "D-HH": (86400, 3600),
    "D-HH:MM": (86400, 3600, 60),
    "D-HH:MM:SS": (86400, 3600, 60, 1),
}
"""How Slurm lets a limit be written, and what each number of it counts in seconds."""


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
        if self.time is not None:
            _check_warning(self.time, self.warn_s)
        words = {"--partition": self.partition, "--account": self.account}
        for option, word in words.items():
            if word is not None and not re.fullmatch(r"[\w.,:@/+-]+", word):
                raise ConfigError(f"{option} {word!r}: expected one word as Slurm knows it")
        if _UNFIT_FOR_SLURM.search(str(self.logs)):
            raise ConfigError(
                f"folder {str(self.logs)!r}: Slurm cannot write logs to a path with a backslash or "
                "a control character; choose another run.folder"
            )


def limit_s(text: str) -> int:
    """Return a limit in seconds, read as Slurm reads it: ``"90"`` is minutes, ``"1-12"`` 36 hours.

    Raises:
        ConfigError: It has none of Slurm's forms, or is zero, by which Slurm means no limit.
    """
    for form, scales in _LIMITS_S.items():
        found = re.fullmatch(re.sub("[A-Z]+", "([0-9]+)", form), text)
        if found is None:
            continue
        numbers = map(int, found.groups())
        if total := sum(number * scale for number, scale in zip(numbers, scales, strict=True)):
            return total
    raise ConfigError(
        f"--time {text!r}: expected one of {', '.join(_LIMITS_S)}, above zero, as 12:00:00; "
        "without --time the partition's own limit holds"
    )


def _check_warning(time: str, warn_s: int) -> None:
    """Refuse a job that would be told to save about as soon as it has started."""
    total_s = limit_s(time)
    if 2 * warn_s >= total_s:
        raise ConfigError(
            f"--warn {warn_s} is not below half of --time {time} ({total_s} s): the ranks would "
            "save and end before they have trained; choose a shorter warning or a longer limit"
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
    yield from _requeue()
    yield 'exit "$code"'


def _requeue() -> Iterator[str]:
    """Yield the lines that queue the job again, if the ranks saved and nobody cancelled it."""
    yield f"# {STOPPED_EXIT_CODE}: asked to stop, everything saved. The next start goes on there."
    yield "# A job that was warned, or preempted with some grace, is RUNNING still. One that was"
    yield "# cancelled is not, and stays cancelled; one preempted at once Slurm queues by itself."
    yield f'if [ "$code" -eq {STOPPED_EXIT_CODE} ]; then'
    yield '  state=$(squeue --noheader --states=all --jobs "$SLURM_JOB_ID" --format %T)'
    yield '  if [ "$state" != RUNNING ]; then'
    yield '    echo "stretto: saved; not queued again: the job is ${state:-unknown}" >&2'
    yield '    exit "$code"'
    yield "  fi"
    yield '  scontrol requeue "$SLURM_JOB_ID" && exit 0'
    yield '  echo "stretto: saved, but scontrol could not queue the job again" >&2'
    yield "fi"


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

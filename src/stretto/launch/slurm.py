"""Generate and submit Slurm batch files.

The ranks find each other through the variables that srun sets, so the file names no address,
interface or fabric. Slurm signals the ranks before the time limit. They save and end with
`STOPPED_EXIT_CODE`, and the file then requeues the job unless it was cancelled.
"""

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import STOPPED_EXIT_CODE, ConfigError, LaunchError

_UNFIT_FOR_SLURM = re.compile(r"[\\\x00-\x1f\x7f]")
"""In a log path Slurm interprets a backslash itself; a line break would end the option."""

_TIME_FORMS: Mapping[str, tuple[int, ...]] = {
    "MM": (60,),
    "MM:SS": (60, 1),
    "HH:MM:SS": (3600, 60, 1),
    "D-HH": (86400, 3600),
    "D-HH:MM": (86400, 3600, 60),
    "D-HH:MM:SS": (86400, 3600, 60, 1),
}
"""Formats of a Slurm time limit, and the seconds that each of its numbers counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A batch job: the command of each rank, its folders, and the resources it requests."""

    name: str
    command: tuple[str, ...]
    """The command that each rank runs; see `rank_command`."""
    folder: Path
    """Absolute working directory."""
    logs: Path
    """Absolute folder of the logs; if it is missing, Slurm writes no logs and reports no error."""
    nodes: int
    tasks_per_node: int
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    time: str | None = None
    """Time limit in Slurm's format, as 12:00:00; None: the partition's limit."""
    partition: str | None = None
    account: str | None = None
    warn_s: int = 120
    """Seconds before the limit at which the ranks are signalled to save."""
    setup: str = ""
    """Shell lines that run first, unchanged."""

    def __post_init__(self) -> None:
        """Refuse values that Slurm would refuse later or would misinterpret."""
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
        names = {"--partition": self.partition, "--account": self.account}
        for option, name in names.items():
            if name is not None and not re.fullmatch(r"[\w.,:@/+-]+", name):
                raise ConfigError(f"{option} {name!r}: expected one word as Slurm knows it")
        if _UNFIT_FOR_SLURM.search(str(self.logs)):
            raise ConfigError(
                f"folder {str(self.logs)!r}: Slurm cannot write logs to a path with a backslash or "
                "a control character; choose another run.folder"
            )


def parse_time_limit_s(text: str) -> int:
    """Return a time limit in seconds, read as Slurm does: ``"90"`` is minutes, ``"1-12"`` 36 hours.

    Raises:
        ConfigError: It has no format of Slurm, or is zero, which Slurm takes as unlimited.
    """
    for form, scales in _TIME_FORMS.items():
        match = re.fullmatch(re.sub("[A-Z]+", "([0-9]+)", form), text)
        if match is None:
            continue
        numbers = map(int, match.groups())
        if total := sum(number * scale for number, scale in zip(numbers, scales, strict=True)):
            return total
    raise ConfigError(
        f"--time {text!r}: expected one of {', '.join(_TIME_FORMS)}, above zero, as 12:00:00; "
        "without --time the partition's own limit holds"
    )


def _check_warning(time: str, warn_s: int) -> None:
    """Refuse a job that would be signalled to save soon after its start."""
    total_s = parse_time_limit_s(time)
    if 2 * warn_s >= total_s:
        raise ConfigError(
            f"--warn {warn_s} is not below half of --time {time} ({total_s} s): the ranks would "
            "save and end before they have trained; choose a shorter warning or a longer limit"
        )


def rank_command(
    arguments: Sequence[str], *, python: Path, container: str | None = None, gpus: bool = False
) -> tuple[str, ...]:
    """Return the command of each rank: ``stretto ARGUMENTS`` in this environment or in a container.

    ``gpus`` makes the host's GPU driver available in the container.
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
    """Yield the sbatch options, each with an explanation."""
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
        yield f"--partition={spec.partition}", "the partition to run in"
    if spec.account is not None:
        yield f"--account={spec.account}", "the account to charge"
    yield f"--signal=USR1@{spec.warn_s}", "sent to the ranks so many seconds before the limit"
    yield "--requeue", "allow a requeue: preempted, a node lost, or at the limit"
    yield "--open-mode=append", "a later start adds to the logs of an earlier one"
    yield f"--output={_log_path(spec.logs, 'slurm-%j.log')}", "output of this script"


def _body(spec: JobSpec) -> Iterator[str]:
    yield "# A preemption may signal this shell too. It must outlive the ranks, to see their end."
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
    """Yield the lines that requeue the job if the ranks saved and the job was not cancelled."""
    yield f"# {STOPPED_EXIT_CODE}: stopped on request after saving. The next start resumes there."
    yield "# A job that was warned, or preempted with a grace time, is still RUNNING. A cancelled"
    yield "# job is not, and stays cancelled. Slurm itself requeues a job preempted at once."
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
    """Yield the lines that start the ranks; the first failure ends the others."""
    yield "srun --kill-on-bad-exit=1 --distribution=block \\"  # consecutive ranks on each host
    if spec.cpus_per_task is not None:  # since Slurm 22.05 srun does not inherit it from sbatch
        yield f"  --cpus-per-task={spec.cpus_per_task} \\"
    yield f"  --output={_log_path(spec.logs, 'slurm-%j-rank-%t.log')} --open-mode=append \\"
    yield f"  {shlex.join(spec.command)}"


def _log_path(folder: Path, pattern: str) -> str:
    """Return a log's path in Slurm's syntax, with percent signs of the folder doubled."""
    return shlex.quote(f"{folder}/".replace("%", "%%") + pattern)


def submit(file: Path) -> str:
    """Submit ``file`` and return the job's id.

    Raises:
        LaunchError: sbatch is missing or refused the file; the message quotes Slurm's.
    """
    try:
        completed = subprocess.run(
            ["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            f"sbatch is not on PATH: {file} is written; submit it where the cluster's commands are"
        ) from None
    if completed.returncode:
        reason = "; ".join(line.strip() for line in completed.stderr.splitlines() if line.strip())
        raise LaunchError(
            f"sbatch refused {file}: {reason or f'it ended with {completed.returncode}'}"
        )
    # --parsable prints the id, and the cluster after a semicolon if there are several.
    return completed.stdout.strip().partition(";")[0]

"""``stretto slurm``: write a run as a batch job for Slurm, and submit it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from stretto.launch.slurm import JobSpec
    from stretto.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFlags:
    """Resources that the job requests."""

    nodes: int
    """Number of hosts."""
    tasks_per_node: int
    """Ranks on each host."""
    gpus_per_node: int | None = None
    """GPUs on each host; none are requested when left out."""
    time: str | None = None
    """Time limit of one start, in one of Slurm's forms, as 12:00:00."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account that is charged."""
    warn: int = 120
    """Seconds before the limit at which ranks save and end; below half of --time."""
    container: str | None = None
    """Apptainer image to run in, instead of this environment."""
    setup: str = ""
    """Shell line to run first, as "module load ..."."""


def slurm(
    run: Path,
    /,
    *overrides: str,
    flags: Annotated[JobFlags, Parameter(name="*")],
    resume: bool = False,
    out: Path | None = None,
    submit: bool = False,
) -> int:
    """Write RUN as an sbatch file that saves before its time limit and requeues itself.

    Parameters
    ----------
    run
        The run file (TOML).
    overrides
        Settings that override the file, as table.key=value.
    resume
        Resume from the newest valid checkpoint at the first start, too.
    out
        File to write, in an existing folder; job.sbatch in the run's folder when left out.
    submit
        Submit the file with sbatch and print the job's id.
    """
    from stretto.launch.run_folder import refuse_existing_run
    from stretto.launch.slurm import sbatch_text
    from stretto.launch.slurm import submit as submit_file
    from stretto.recipes import load_run
    from stretto.telemetry.sinks import write_atomically

    config = load_run(run, overrides).config
    refuse_existing_run(config.run_dir, resume)
    again = ["--resume"] if resume else []
    target = str(run.resolve()) if run.is_file() else str(run)
    spec = _job(config, ["train", target, *overrides, *again], flags)
    file = (config.run_dir / "job.sbatch" if out is None else _check_out_file(out)).absolute()
    _warn_of_missing(flags.container)
    _warn_of_unused_gpus(flags.gpus_per_node)
    spec.logs.mkdir(parents=True, exist_ok=True)
    write_atomically(file, sbatch_text(spec))
    print(f"stretto slurm: wrote {file}", file=sys.stderr)
    print(submit_file(file) if submit else file)
    return 0


def _job(config: "RunConfig", arguments: list[str], flags: JobFlags) -> "JobSpec":
    from stretto.launch.slurm import JobSpec, rank_command

    gpus = flags.gpus_per_node is not None
    # Not resolved: the interpreter of a virtual environment is a symbolic link.
    python = Path(sys.executable).absolute()
    return JobSpec(
        name=config.run.name,
        command=rank_command(
            arguments, python=python, container=_image_path(flags.container), gpus=gpus
        ),
        folder=Path.cwd(),
        logs=config.run_dir.absolute() / "logs",
        nodes=flags.nodes,
        tasks_per_node=flags.tasks_per_node,
        cpus_per_task=config.run.threads,
        gpus_per_node=flags.gpus_per_node,
        time=flags.time,
        partition=flags.partition,
        account=flags.account,
        warn_s=flags.warn,
        setup=flags.setup,
    )


def _check_out_file(out: Path) -> Path:
    """Return ``out``; raise `ConfigError` if no file can be written there."""
    from stretto.errors import ConfigError

    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it, or name another")
    return out


def _warn_of_missing(container: str | None) -> None:
    """Warn if the image is not on this host; the job's hosts may have it."""
    image = _image_path(container)
    if image is None or "://" in image or Path(image).exists():
        return
    print(
        f"stretto slurm: warning: --container {image} is not there on this host; the job fails "
        "where its hosts do not see it either",
        file=sys.stderr,
    )


def _warn_of_unused_gpus(gpus_per_node: int | None) -> None:
    """Warn if the job reserves GPUs, which training leaves idle."""
    if gpus_per_node:
        print(
            f"stretto slurm: warning: --gpus-per-node {gpus_per_node} reserves GPUs that stretto "
            "train does not use yet: it trains on CPUs; leave the flag out",
            file=sys.stderr,
        )


def _image_path(container: str | None) -> str | None:
    """Return a file's absolute path, but an image that Apptainer fetches (docker://) unchanged."""
    if container is None or "://" in container:
        return container
    return str(Path(container).absolute())

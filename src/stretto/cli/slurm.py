"""``stretto slurm``: a run as a batch job."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from stretto.launch.slurm.job import JobSpec
    from stretto.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the job asks of the cluster."""

    nodes: int
    """Hosts."""
    tasks_per_node: int
    """Ranks on each host."""
    gpus_per_node: int | None = None
    """Accelerators on each host; none are asked for when left out."""
    time: str | None = None
    """Limit of one start, in one of Slurm's forms, as 12:00:00."""
    partition: str | None = None
    """Where the job may run."""
    account: str | None = None
    """Who pays."""
    warn: int = 120
    """Seconds before the limit at which the ranks save and end; below half of --time."""
    container: str | None = None
    """An Apptainer image to run in, instead of this environment."""
    setup: str = ""
    """A shell line to run first, as "module load ..."."""


def slurm(
    run: Path,
    /,
    *overrides: str,
    ask: Annotated[Ask, Parameter(name="*")],
    resume: bool = False,
    out: Path | None = None,
    submit: bool = False,
) -> int:
    """Write RUN as an sbatch file that saves before its time limit and queues itself again.

    Parameters
    ----------
    run
        The run file (TOML).
    overrides
        Settings laid over the file, as table.key=value.
    resume
        Go on from the newest valid checkpoint at the first start, too.
    out
        Where to write the file, in a folder that exists; job.sbatch in the run's folder when left
        out.
    submit
        Hand it to sbatch, and print the job's id.
    """
    from stretto.launch.folder import refuse_taken
    from stretto.launch.slurm.job import sbatch_text
    from stretto.launch.slurm.submit import submit as hand_in
    from stretto.recipes import load_run
    from stretto.telemetry.aside import write_aside

    config = load_run(run, overrides).config
    refuse_taken(config.run_dir, resume)
    again = ["--resume"] if resume else []
    target = str(run.resolve()) if run.is_file() else str(run)
    spec = _job(config, ["train", target, *overrides, *again], ask)
    file = (config.run_dir / "job.sbatch" if out is None else _checked(out)).absolute()
    _warn_of_missing(ask.container)
    spec.logs.mkdir(parents=True, exist_ok=True)
    write_aside(file, sbatch_text(spec))
    print(f"stretto slurm: wrote {file}", file=sys.stderr)
    print(hand_in(file) if submit else file)
    return 0


def _job(config: "RunConfig", arguments: list[str], ask: Ask) -> "JobSpec":
    from stretto.launch.slurm.job import JobSpec, rank_command

    gpus = ask.gpus_per_node is not None
    python = Path(sys.executable).absolute()  # not resolved: a link is what makes an environment
    return JobSpec(
        name=config.run.name,
        command=rank_command(arguments, python=python, container=_image(ask.container), gpus=gpus),
        folder=Path.cwd(),
        logs=config.run_dir.absolute() / "logs",
        nodes=ask.nodes,
        tasks_per_node=ask.tasks_per_node,
        cpus_per_task=config.run.threads,
        gpus_per_node=ask.gpus_per_node,
        time=ask.time,
        partition=ask.partition,
        account=ask.account,
        warn_s=ask.warn,
        setup=ask.setup,
    )


def _checked(out: Path) -> Path:
    """Return ``out``; raise `ConfigError` where no file can be written."""
    from stretto.errors import ConfigError

    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}; make it, or name another")
    return out


def _warn_of_missing(container: str | None) -> None:
    """Say that an image is not here; the job is written all the same, its hosts may see more."""
    image = _image(container)
    if image is None or "://" in image or Path(image).exists():
        return
    print(
        f"stretto slurm: warning: --container {image} is not there on this host; the job fails "
        "where its hosts do not see it either",
        file=sys.stderr,
    )


def _image(container: str | None) -> str | None:
    """Return a file's absolute path; an image that Apptainer fetches (as docker://) as it is."""
    if container is None or "://" in container:
        return container
    return str(Path(container).absolute())

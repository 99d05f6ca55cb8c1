"""``stretto train``: one run file, one rank or many."""

import sys
from pathlib import Path

MOST_WORKERS_PER_CORE = 16
"""More ranks than this on one machine are a slip of the finger."""


def train(run: Path, /, *overrides: str, workers: int | None = None, resume: bool = False) -> int:
    """Train what RUN describes.

    Alone it is one rank; with --workers it starts that many on this machine; under torchrun, srun,
    mpirun or in a lab it joins. TERM, INT, USR1 or USR2 to any rank: all save and end with 75.

    Parameters
    ----------
    run
        The run file (TOML), or the name of a recipe.
    overrides
        Settings laid over the file, as table.key=value; table.key= takes one back to its default.
    workers
        Ranks to start here.
    resume
        Go on from the newest valid checkpoint of this run.
    """
    from stretto.launch.early import quiet_torch, signals_held_back

    quiet_torch()
    # model.target may name a module beside the run file or where we stand, as `python -m` allows.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    if workers is None:
        with signals_held_back():
            return _join(run, overrides, resume)
    return _launch(run, overrides, workers, resume)


def _join(run: Path, overrides: tuple[str, ...], resume: bool) -> int:
    """Be one rank, as whoever started us says."""
    from stretto.cluster.detect import detect
    from stretto.errors import STOPPED_EXIT_CODE
    from stretto.launch.worker import run_worker
    from stretto.recipes import load_run

    ended = run_worker(load_run(run, overrides), detect(), resume=resume)
    return STOPPED_EXIT_CODE if ended and ended.again else 0


def _launch(run: Path, overrides: tuple[str, ...], workers: int, resume: bool) -> int:
    """Start ranks here, once what can be seen beforehand is in order; return how they ended."""
    from stretto.errors import STOPPED_EXIT_CODE
    from stretto.launch.folder import newest_checkpoint, refuse_taken
    from stretto.launch.local import run_here
    from stretto.recipes import load_run
    from stretto.run import prepare
    from stretto.train.finetune import check_init

    config = load_run(run, overrides).config
    check_workers(workers)
    refuse_taken(config.run_dir, resume)
    prepared = prepare(config)
    if not resume:
        check_init(config.init, prepared.model, _say)
    arguments = ["train", str(run), *overrides, *(["--resume"] if resume else [])]
    outcome = run_here(arguments, workers, logs=config.run_dir / "logs", say=_say, keep_logs=resume)
    if outcome.reason:
        _say(outcome.reason)
    said = outcome.exit_code in (0, STOPPED_EXIT_CODE)
    if not said and (kept := newest_checkpoint(config.run_dir)):
        _say(f"the newest checkpoint is {kept}: go on with --resume")
    return outcome.exit_code


def check_workers(workers: int) -> None:
    """Refuse a number of ranks that this machine cannot mean, or to be a launcher inside one."""
    from stretto.cluster.detect import detect
    from stretto.cluster.words import fair_threads
    from stretto.errors import ConfigError

    most = MOST_WORKERS_PER_CORE * fair_threads(1, {})
    if not 1 <= workers <= most:
        raise ConfigError(f"--workers {workers}: expected 1 to {most} ranks on this machine")
    world = detect()
    if world.meeting is not None:
        raise ConfigError(
            f"--workers {workers}: this process is rank {world.rank} of {world.size} already "
            f"(started by {world.launcher}); leave --workers out to join"
        )


def _say(line: str) -> None:
    print(f"stretto: {line}", file=sys.stderr)

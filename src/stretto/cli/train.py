"""``stretto train``: train a run file on one rank or many."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.cluster.world import World
    from stretto.run import RunConfig
    from stretto.studies.auto_choice import AutoChoice

MAX_WORKERS_PER_CORE = 16
"""More ranks than this on one machine are taken for a typing error."""


def train(run: Path, /, *overrides: str, workers: int | None = None, resume: bool = False) -> int:
    """Train what RUN describes.

    Started alone it is one rank; with --workers it starts that many on this machine; under
    torchrun, srun, mpirun or in a lab it joins the job. On TERM, INT, USR1 or USR2 to any rank, all
    ranks save a checkpoint and exit with code 75.

    Parameters
    ----------
    run
        The run file (TOML), or the name of a recipe.
    overrides
        Settings that override the file, as table.key=value; table.key= restores its default.
    workers
        Number of ranks to start on this machine.
    resume
        Resume from the newest valid checkpoint of this run.
    """
    from stretto.launch.process_setup import block_stop_signals, quiet_torch

    quiet_torch()
    # model.target may name a module beside the run file or in the working directory.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    if workers is None:
        with block_stop_signals():
            return _join(run, overrides, resume)
    return _launch(run, overrides, workers, resume)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Import without garbage collection: it finds nothing then, and costs each rank 0.3 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _join(run: Path, overrides: tuple[str, ...], resume: bool) -> int:
    """Run as one rank of the job that the environment describes."""
    with _collector_off():
        from stretto.cluster.detect import detect_world
        from stretto.errors import STOPPED_EXIT_CODE
        from stretto.launch.worker import run_worker
        from stretto.recipes import load_run

    ended = run_worker(
        load_run(run, overrides), detect_world(), resume=resume, choose_strategy=_choose_strategy
    )
    return STOPPED_EXIT_CODE if ended and ended.again else 0


def _choose_strategy(config: "RunConfig", world: "World") -> "AutoChoice":
    from stretto.studies.auto_choice import choose_strategy

    return choose_strategy(config, world)


def _launch(run: Path, overrides: tuple[str, ...], workers: int, resume: bool) -> int:
    """Check the run, start ranks on this machine and return their exit code."""
    with _collector_off():
        from stretto.errors import STOPPED_EXIT_CODE
        from stretto.launch.local_workers import run_local_workers
        from stretto.launch.run_folder import newest_checkpoint, refuse_existing_run
        from stretto.recipes import load_run
        from stretto.run import prepare
        from stretto.train.finetune import check_init

    config = load_run(run, overrides).config
    check_workers(workers)
    refuse_existing_run(config.run_dir, resume)
    prepared = prepare(config)
    if not resume:
        check_init(config.init, prepared.model, _say)
    arguments = ["train", str(run), *overrides, *(["--resume"] if resume else [])]
    outcome = run_local_workers(
        arguments, workers, logs=config.run_dir / "logs", log_line=_say, keep_logs=resume
    )
    if outcome.reason:
        _say(outcome.reason)
    ended_normally = outcome.exit_code in (0, STOPPED_EXIT_CODE)
    if not ended_normally and (newest := newest_checkpoint(config.run_dir)):
        _say(f"the newest checkpoint is {newest}: go on with --resume")
    return outcome.exit_code


def check_workers(workers: int) -> None:
    """Check that this process may start ``workers`` ranks on this machine.

    Raises:
        ConfigError: The number is out of range, or this process is a rank of a job already.
    """
    from stretto.cluster.detect import detect_world
    from stretto.cluster.environment import threads_per_rank
    from stretto.errors import ConfigError

    most = MAX_WORKERS_PER_CORE * threads_per_rank(1, {})
    if not 1 <= workers <= most:
        raise ConfigError(f"--workers {workers}: expected 1 to {most} ranks on this machine")
    world = detect_world()
    if world.store_address is not None:
        raise ConfigError(
            f"--workers {workers}: this process is rank {world.rank} of {world.size} already "
            f"(started by {world.launcher}); leave --workers out to join"
        )


def _say(line: str) -> None:
    print(f"stretto: {line}", file=sys.stderr)

"""``stretto train``: one run file, one rank or many."""

import sys
from pathlib import Path

from stretto.cluster.detect import detect
from stretto.config import load
from stretto.errors import ConfigError
from stretto.launch.local import run_here
from stretto.launch.worker import refuse_taken, run_worker
from stretto.run import RunConfig, prepare


def train(run: Path, /, *overrides: str, workers: int | None = None, resume: bool = False) -> int:
    """Train what RUN describes.

    Alone it is one rank; with --workers it starts that many on this machine; under torchrun or in
    a lab it joins.

    Parameters
    ----------
    run
        The run file (TOML).
    overrides
        Settings laid over the file, as table.key=value.
    workers
        Ranks to start here.
    resume
        Go on from the newest valid checkpoint of this run.
    """
    # model.target may name a module beside the run file or where we stand, as `python -m` allows.
    sys.path[:0] = [str(run.parent.resolve()), str(Path.cwd())]
    loaded = load(RunConfig, run, overrides)
    world = detect()
    if workers is None:
        run_worker(loaded, world, resume=resume)
        return 0
    if workers < 1:
        raise ConfigError(f"--workers {workers}: expected a number of ranks, at least 1")
    if world.meeting is not None:
        raise ConfigError(
            f"--workers {workers}: this process is rank {world.rank} of {world.size} already "
            f"(started by {world.launcher}); leave --workers out to join"
        )
    refuse_taken(loaded.config.run_dir, resume)
    prepare(loaded.config)
    arguments = ["train", str(run), *overrides, *(["--resume"] if resume else [])]
    logs = loaded.config.run_dir / "logs"
    outcome = run_here(arguments, workers, logs=logs, say=_say)
    if outcome.reason:
        _say(outcome.reason)
    return outcome.exit_code


def _say(line: str) -> None:
    print(f"stretto: {line}", file=sys.stderr)

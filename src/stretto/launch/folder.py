"""The run's folder: who may write there, and what it holds already."""

import fcntl
from contextlib import ExitStack
from pathlib import Path

from stretto.checkpoint import next_generation
from stretto.comm.channel import Channel
from stretto.comm.spread import spread_text
from stretto.config import Loaded, to_toml
from stretto.errors import ConfigError, StrettoError
from stretto.run import RunConfig


def enter_run(stack: ExitStack, loaded: Loaded[RunConfig], channel: Channel, resume: bool) -> int:
    """Let rank 0 take the run folder, or refuse it for all; return this start's generation."""
    run_dir = loaded.config.run_dir
    answer = ""
    if channel.rank == 0:
        try:
            refuse_taken(run_dir, resume)
            run_dir.mkdir(parents=True, exist_ok=True)
            _lock(stack, run_dir, resume)
            answer = str(next_generation(run_dir))
            (run_dir / "resolved.toml").write_text(to_toml(loaded))
        except StrettoError as wrong:
            answer = str(wrong)
        except OSError as wrong:
            answer = f"run folder {run_dir} cannot be written: {wrong.strerror}"
    answer = spread_text(answer, channel)
    if not answer.isdigit():
        raise ConfigError(answer)
    return int(answer)


def _lock(stack: ExitStack, run_dir: Path, resume: bool) -> None:
    """Hold the folder as long as this process lives; refuse a second start beside a living one.

    A resumed run goes on regardless: a rank that a restart left behind may still hold the lock,
    and its generation keeps it from writing.
    """
    lock = stack.enter_context((run_dir / "lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not resume:
            raise _in_use(run_dir) from None


def _refuse_in_use(run_dir: Path) -> None:
    """Refuse a folder that a living run holds, without holding it."""
    if not (run_dir / "lock").exists():
        return
    with (run_dir / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(run_dir) from None


def _in_use(run_dir: Path) -> ConfigError:
    return ConfigError(
        f"run folder {run_dir} is in use by a run that goes on: wait for it, or give this one "
        "another name: run.name=..."
    )


def newest_checkpoint(run_dir: Path) -> str | None:
    """Return the name of the newest checkpoint in a run's folder, damaged or not."""
    return max(
        (path.name for path in (run_dir / "checkpoints").glob("step-????????")), default=None
    )


def refuse_taken(run_dir: Path, resume: bool) -> None:
    """Raise `ConfigError` where a run would be overwritten, or its folder cannot be one."""
    if any(path.exists() and not path.is_dir() for path in (run_dir, *run_dir.parents)):
        raise ConfigError(f"run folder {run_dir}: a part of this path is a file, not a folder")
    if not resume:
        _refuse_in_use(run_dir)
    if (kept := newest_checkpoint(run_dir)) and not resume:
        raise ConfigError(
            f"run folder {run_dir} holds a run already (newest checkpoint {kept}); go on with "
            "--resume, or give this one another name: run.name=..."
        )

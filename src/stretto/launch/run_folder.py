"""The run folder: create and lock it, and refuse to overwrite another run."""

import fcntl
from contextlib import ExitStack
from pathlib import Path

from stretto.checkpoint import next_generation
from stretto.comm.broadcast import broadcast_text
from stretto.comm.transport import Transport
from stretto.config import LoadedConfig, to_toml
from stretto.errors import ConfigError, StrettoError
from stretto.run import RunConfig


def claim_run_folder(
    stack: ExitStack, loaded: LoadedConfig[RunConfig], transport: Transport, resume: bool
) -> int:
    """Let rank 0 create and lock the run folder; return the generation of this start.

    All ranks call this together.

    Raises:
        ConfigError: On all ranks, if the folder cannot be used.
    """
    run_dir = loaded.config.run_dir
    answer = ""
    if transport.rank == 0:
        try:
            refuse_existing_run(run_dir, resume)
            run_dir.mkdir(parents=True, exist_ok=True)
            _lock_run_folder(stack, run_dir, resume)
            answer = str(next_generation(run_dir))
            (run_dir / "resolved.toml").write_text(to_toml(loaded))
        except StrettoError as wrong:
            answer = str(wrong)
        except OSError as wrong:
            answer = f"run folder {run_dir} cannot be written: {wrong.strerror}"
    answer = broadcast_text(answer, transport)
    if not answer.isdigit():
        raise ConfigError(answer)
    return int(answer)


def _lock_run_folder(stack: ExitStack, run_dir: Path, resume: bool) -> None:
    """Lock the folder while this process lives; refuse if another process holds the lock.

    A resumed run continues without the lock: a rank left over from before the restart may still
    hold it, and the generation keeps that rank from writing.
    """
    lock = stack.enter_context((run_dir / "lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not resume:
            raise _in_use_error(run_dir) from None


def _refuse_in_use(run_dir: Path) -> None:
    """Refuse a folder that a running process has locked, without locking it."""
    if not (run_dir / "lock").exists():
        return
    with (run_dir / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use_error(run_dir) from None


def _in_use_error(run_dir: Path) -> ConfigError:
    return ConfigError(
        f"run folder {run_dir} is in use by a run that goes on: wait for it, or give this one "
        "another name: run.name=..."
    )


def newest_checkpoint(run_dir: Path) -> str | None:
    """Return the name of the newest checkpoint in a run's folder, valid or damaged."""
    return max(
        (path.name for path in (run_dir / "checkpoints").glob("step-????????")), default=None
    )


def refuse_existing_run(run_dir: Path, resume: bool) -> None:
    """Raise `ConfigError` if a run would be overwritten, or the path cannot be a folder."""
    if any(path.exists() and not path.is_dir() for path in (run_dir, *run_dir.parents)):
        raise ConfigError(f"run folder {run_dir}: a part of this path is a file, not a folder")
    if not resume:
        _refuse_in_use(run_dir)
    if (kept := newest_checkpoint(run_dir)) and not resume:
        raise ConfigError(
            f"run folder {run_dir} holds a run already (newest checkpoint {kept}); go on with "
            "--resume, or give this one another name: run.name=..."
        )

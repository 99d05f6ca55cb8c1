"""One rank's life: find the others, put the parts together, train, leave things in order."""

import fcntl
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import torch

from stretto.checkpoint import next_generation
from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.comm.connect import connect
from stretto.comm.spread import spread_text
from stretto.config import Loaded, to_toml
from stretto.errors import ConfigError, StrettoError
from stretto.run import RunConfig, assemble, digest, prepare, resolve_run
from stretto.telemetry.events import Event, RunEnded, RunStarted
from stretto.telemetry.live import console_sink
from stretto.telemetry.sinks import JsonLines, fan_out
from stretto.telemetry.timeline import write_chrome_trace
from stretto.train.loop import train
from stretto.train.parts import Parts
from stretto.train.state import resume_state


def run_worker(
    loaded: Loaded[RunConfig], world: World, *, resume: bool = False, stream: TextIO | None = None
) -> RunEnded | None:
    """Train as one rank of ``world``; every rank calls this with the same run.

    Returns:
        How it ended; None when the resumed run had nothing left to do.
    """
    stream = stream or sys.stderr
    torch.set_num_threads(loaded.config.run.threads or world.threads)
    prepared = prepare(loaded.config)
    loaded = resolve_run(loaded, world, prepared.model)
    config = loaded.config
    with ExitStack() as stack:
        channel = connect(world, config.run.timeout_s)
        stack.callback(channel.close)
        _check_same_config(config, channel)
        generation = _enter_run(stack, loaded, channel, resume)
        report = _open_sinks(stack, config.run_dir, channel.rank, resume, stream)
        parts = assemble(loaded, prepared, world, channel, report, generation)
        stack.callback(parts.strategy.close)
        first_step = _resume(parts, stream) if resume else 0
        if first_step >= parts.total_steps:
            stream.write(
                f"{config.run.name} is at step {first_step} of {parts.total_steps} already: raise "
                "train.steps or train.epochs to train on\n"
            )
            return None
        if config.run.trace:
            stack.callback(_write_trace, config.run_dir, parts, stream)
        report(_started(config, parts, first_step))
        return train(parts, first_step)


def _enter_run(stack: ExitStack, loaded: Loaded[RunConfig], channel: Channel, resume: bool) -> int:
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
            raise ConfigError(
                f"run folder {run_dir} is in use by a run that goes on: wait for it, or give this "
                "one another name: run.name=..."
            ) from None


def newest_checkpoint(run_dir: Path) -> str | None:
    """Return the name of the newest checkpoint in a run's folder, damaged or not."""
    return max(
        (path.name for path in (run_dir / "checkpoints").glob("step-????????")), default=None
    )


def refuse_taken(run_dir: Path, resume: bool) -> None:
    """Raise `ConfigError` where a run would be overwritten, or its folder cannot be one."""
    if any(path.exists() and not path.is_dir() for path in (run_dir, *run_dir.parents)):
        raise ConfigError(f"run folder {run_dir}: a part of this path is a file, not a folder")
    if (kept := newest_checkpoint(run_dir)) and not resume:
        raise ConfigError(
            f"run folder {run_dir} holds a run already (newest checkpoint {kept}); go on with "
            "--resume, or give this one another name: run.name=..."
        )


def _check_same_config(config: RunConfig, channel: Channel) -> None:
    mine = digest(config)
    if (theirs := spread_text(mine, channel)) != mine:
        raise ConfigError(
            f"rank {channel.rank} has other settings than rank 0 (digests {mine} and {theirs}): "
            "give every rank the same run file and overrides"
        )


def _open_sinks(
    stack: ExitStack, run_dir: Path, rank: int, resume: bool, stream: TextIO
) -> Callable[[Event], None]:
    """Return where events go: on rank 0 to the run's JSON lines and the screen."""
    if rank:
        return lambda _event: None
    sink = fan_out([JsonLines(run_dir / "events.jsonl", append=resume), console_sink(stream)])
    stack.callback(sink.close)
    return sink


def _started(config: RunConfig, parts: Parts, first_step: int) -> RunStarted:
    return RunStarted(
        run=config.run.name,
        workers=parts.world.size,
        hosts=parts.world.mesh.hosts,
        strategy=config.strategy.kind,
        steps=parts.total_steps,
        model=config.model.kind,
        parameters=sum(p.numel() for p in parts.model.parameters()),
        threads=config.run.threads or 0,
        note=f"resumed at step {first_step}" if first_step else "",
    )


def _resume(parts: Parts, stream: TextIO) -> int:
    first_step = resume_state(parts, log=lambda line: stream.writelines([line, "\n"]))
    if not first_step and parts.channel.rank == 0:
        stream.write(f"no valid checkpoint in {parts.checkpoints}: starting at the beginning\n")
    return first_step


def _write_trace(run_dir: Path, parts: Parts, stream: TextIO) -> None:
    """Write the time-line; a run that trained does not fail because its trace found no room."""
    path = run_dir / "trace" / f"rank-{parts.world.rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(path, [parts.recorder.timeline()])
    except OSError as failure:
        stream.write(f"the time-line {path} could not be written: {failure.strerror}\n")

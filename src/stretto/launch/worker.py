"""One rank's life: find the others, put the parts together, train, leave things in order."""

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
        generation = _enter_run(loaded, channel, resume)
        report = _open_sinks(stack, config.run_dir, channel.rank, resume, stream)
        parts = assemble(loaded, prepared, world, channel, report, generation)
        stack.callback(parts.strategy.close)
        if config.run.trace:
            stack.callback(_write_trace, config.run_dir, parts)
        first_step = 0
        if resume:
            first_step = resume_state(parts, log=lambda line: stream.writelines([line, "\n"]))
        if first_step >= parts.total_steps:
            stream.write(
                f"{config.run.name} is at step {first_step} of {parts.total_steps} already: raise "
                "train.steps or train.epochs to train on\n"
            )
            return None
        report(_started(config, parts, first_step))
        return train(parts, first_step)


def _enter_run(loaded: Loaded[RunConfig], channel: Channel, resume: bool) -> int:
    """Let rank 0 take the run folder, or refuse it for all; return this start's generation."""
    run_dir = loaded.config.run_dir
    answer = ""
    if channel.rank == 0:
        try:
            refuse_taken(run_dir, resume)
            run_dir.mkdir(parents=True, exist_ok=True)
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


def refuse_taken(run_dir: Path, resume: bool) -> None:
    """Raise `ConfigError` where a run would be overwritten, or its folder cannot be one."""
    if any(path.exists() and not path.is_dir() for path in (run_dir, *run_dir.parents)):
        raise ConfigError(f"run folder {run_dir}: a part of this path is a file, not a folder")
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    if kept and not resume:
        raise ConfigError(
            f"run folder {run_dir} holds a run already (newest checkpoint {kept[-1]}); go on with "
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


def _write_trace(run_dir: Path, parts: Parts) -> None:
    folder = run_dir / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{parts.world.rank}.json"
    write_chrome_trace(path, [parts.recorder.timeline()])

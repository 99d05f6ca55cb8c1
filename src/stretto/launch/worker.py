"""One rank's life: find the others, put the parts together, train, leave things in order."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import torch

from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.comm.small import gather_text, meet_all
from stretto.comm.spread import spread_text
from stretto.config import Loaded
from stretto.data.source import Place
from stretto.errors import STOPPED_EXIT_CODE, ConfigError
from stretto.launch.folder import enter_run
from stretto.launch.parent import WORKERS, end_with_parent
from stretto.launch.seat import Seat, blaming, control_of, leave, take_seat
from stretto.launch.stop import StopRequest, heeding
from stretto.run import (
    Prepared,
    RunConfig,
    assemble,
    derived_for,
    digest,
    flat_settings,
    prepare,
    resolve_run,
)
from stretto.telemetry.events import Event, RunEnded, RunStarted
from stretto.telemetry.live import console_sink
from stretto.telemetry.sinks import JsonLines, fan_out
from stretto.telemetry.timeline import write_chrome_trace
from stretto.telemetry.trackers import keep_local, open_trackers
from stretto.telemetry.wording import ranks_in_words
from stretto.train.finetune import take_over_
from stretto.train.loop import train
from stretto.train.parts import Parts
from stretto.train.state import resume_state

_SAME = {
    "settings": "give every rank the same run file and overrides",
    "training data": "give every rank the same files, or a folder that all hosts share",
    "test data": "give every rank the same files, or a folder that all hosts share",
}
"""What must be equal on all ranks, and what to do where it is not."""


def run_worker(
    loaded: Loaded[RunConfig], world: World, *, resume: bool = False, stream: TextIO | None = None
) -> RunEnded | None:
    """Train as one rank of ``world``; every rank calls this with the same run.

    A job that its launcher started again resumes by itself.

    Returns:
        How it ended; None when the resumed run had nothing left to do.
    """
    stream = stream or sys.stderr
    resume = resume or world.generation > 0
    if world.meeting is not None:
        end_with_parent()
    torch.set_num_threads(loaded.config.run.threads or world.threads)
    with heeding() as request, ExitStack() as seats:
        prepared = prepare(loaded.config)
        seat = take_seat(seats, loaded.config.run, world, stream)
        request.defer()
        with ExitStack() as stack, blaming(seat):
            # Only after the roll call is it known which ranks share a host.
            whole = resolve_run(loaded, seat.world, prepared.model)
            ended = _run(stack, whole, prepared, seat, request, resume)
        if ended is not None and ended.again:
            request.close()
            _say_how_to_go_on(seat)
        # All is written and closed; some launchers end everybody when the first rank leaves.
        leave(seat)
        return ended


def _run(
    stack: ExitStack,
    loaded: Loaded[RunConfig],
    prepared: Prepared,
    seat: Seat,
    request: StopRequest,
    resume: bool,
) -> RunEnded | None:
    config, channel = loaded.config, seat.channel
    _check_same_run(config, prepared, channel)
    generation = enter_run(stack, loaded, channel, resume)
    _start_data(stack, prepared, seat, f"{config.run.name}-{generation}")
    report = _open_sinks(stack, config, seat, resume)
    parts = assemble(loaded, prepared, seat.world, channel, report, generation)
    stack.callback(parts.strategy.close)
    first_step, note = _first_step(parts, config, resume, seat.say)
    if over := _nothing_left(parts, first_step):
        if channel.rank == 0:
            seat.say(f"{config.run.name} {over}")
        return None
    if config.run.trace:
        stack.callback(_write_trace, config.run_dir, parts, seat.say)
    report(_started(config, parts, note))
    for told in parts.notes:
        seat.say(told)
    if channel.rank == 0 and config.optim.reference_batch is not None:
        for line in derived_for(config, parts.source.num_samples).lines():
            seat.say(f"{line.name} {line.value}: {line.rule}")
    return train(parts, first_step, control_of(seat, request))


def _say_how_to_go_on(seat: Seat) -> None:
    """Tell what comes next; our own launcher says it once for all, others do not know it."""
    if seat.world.rank or seat.world.launcher == WORKERS:
        return
    if seat.world.ask_restart:
        command = " ".join(seat.world.ask_restart)
        seat.say(f"saved; `{command}` starts this job again, and it goes on by itself")
    else:
        seat.say(f"saved; go on with --resume (exit code {STOPPED_EXIT_CODE})")


def _start_data(stack: ExitStack, prepared: Prepared, seat: Seat, key: str) -> None:
    mesh, world = seat.world.mesh, seat.world
    place = Place(
        world.local_rank,
        mesh.ranks_per_host[world.host],
        spread_text(f"{key}-{os.getpid()}", seat.channel),
        lambda: meet_all(seat.control),
    )
    for source in (prepared.source, prepared.test_source):
        stack.callback(source.close)
        source.start(place)


def _first_step(
    parts: Parts, config: RunConfig, resume: bool, say: Callable[[str], None]
) -> tuple[int, str]:
    """Take up a checkpoint, ours or one to start from; return the step and a word about it."""
    first_step = resume_state(parts, log=say) if resume else 0
    if first_step:
        return first_step, f"resumed at step {first_step}"
    if resume and parts.channel.rank == 0:
        say(f"no valid checkpoint in {parts.checkpoints}: starting at the beginning")
    return 0, take_over_(parts, config.init, say).note


def _nothing_left(parts: Parts, first_step: int) -> str:
    if first_step >= parts.total_steps:
        return (
            f"is at step {first_step} of {parts.total_steps} already: raise train.steps or "
            "train.epochs to train on"
        )
    if first_step and parts.watch.verdict:
        return (
            f"ended at step {first_step} already: {parts.watch.verdict}; raise "
            "train.early_stop.patience to train on"
        )
    return ""


def _check_same_run(config: RunConfig, prepared: Prepared, channel: Channel) -> None:
    """Refuse ranks that would train something else than rank 0: all of them learn which."""
    facts = {
        "settings": digest(config),
        "training data": prepared.source.fingerprint,
        "test data": prepared.test_source.fingerprint,
    }
    told = [json.loads(text) for text in gather_text(json.dumps(facts), channel)]
    for what, advice in _SAME.items():
        others = [rank for rank, theirs in enumerate(told) if theirs[what] != told[0][what]]
        if others:
            values = f"{told[0][what]} and {told[others[0]][what]}"
            raise ConfigError(
                f"{ranks_in_words(others)} and rank 0 have different {what} ({values}): {advice}"
            )


def _open_sinks(
    stack: ExitStack, config: RunConfig, seat: Seat, resume: bool
) -> Callable[[Event], None]:
    """Return where events go: on rank 0 to the run's JSON lines, the screen and trackers."""
    if seat.world.rank:
        return lambda _event: None
    keep_local(config.run.trackers, os.environ)
    truth = JsonLines(config.run_dir / "events.jsonl", append=resume)
    trackers = open_trackers(
        config.run.trackers,
        config.run_dir,
        config.run.name,
        flat_settings(config),
        resumed=resume,
        say=seat.say,
    )
    sink = fan_out([truth, console_sink(seat.stream), *trackers])
    stack.callback(sink.close)
    return sink


def _started(config: RunConfig, parts: Parts, note: str) -> RunStarted:
    return RunStarted(
        run=config.run.name,
        workers=parts.world.size,
        hosts=parts.world.mesh.hosts,
        strategy=config.strategy.kind,
        steps=parts.total_steps,
        model=config.model.kind,
        parameters=sum(p.numel() for p in parts.model.parameters()),
        threads=config.run.threads or 0,
        note=note,
    )


def _write_trace(run_dir: Path, parts: Parts, say: Callable[[str], None]) -> None:
    """Write the time-line; a run that trained does not fail because its trace found no room."""
    path = run_dir / "trace" / f"rank-{parts.world.rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(path, [parts.recorder.timeline()])
    except OSError as failure:
        say(f"the time-line {path} could not be written: {failure.strerror}")

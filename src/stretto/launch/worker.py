"""The main function of one rank: join the other ranks, assemble the run, train, clean up."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import torch

from stretto.cluster.world import World
from stretto.comm.broadcast import broadcast_text, compute_on_rank_0
from stretto.comm.transport import Transport, all_gather_text, barrier
from stretto.config import LoadedConfig, replace_table
from stretto.data.sample_source import HostContext
from stretto.errors import STOPPED_EXIT_CODE, ConfigError
from stretto.launch.process_setup import LAUNCHER_NAME, exit_with_parent
from stretto.launch.run_folder import claim_run_folder
from stretto.launch.worker_context import (
    StopRequest,
    WorkerContext,
    catch_stop_request,
    join_world,
    leave_world,
    make_control_plane,
    report_failures,
)
from stretto.run import (
    PreparedRun,
    RunConfig,
    assemble,
    derive_rates,
    flat_settings,
    prepare,
    resolve_run,
    settings_digest,
)
from stretto.strategies import AnyStrategyConfig, AutoConfig
from stretto.telemetry.event_text import ranks_text
from stretto.telemetry.events import Event, RunEnded, RunStarted
from stretto.telemetry.live import console_sink
from stretto.telemetry.sinks import JsonLines, fan_out
from stretto.telemetry.timeline import write_chrome_trace
from stretto.telemetry.trackers import open_trackers, set_tracker_environment
from stretto.train.finetune import init_from_checkpoint
from stretto.train.loop import train
from stretto.train.run_parts import RunParts
from stretto.train.state import resume_state

_MUST_MATCH = {
    "settings": "give every rank the same run file and overrides",
    "training data": "give every rank the same files, or a folder that all hosts share",
    "test data": "give every rank the same files, or a folder that all hosts share",
}
"""Facts that must be equal on all ranks, and advice if they are not."""


ChooseStrategy = Callable[[RunConfig, World], tuple[AnyStrategyConfig, str]]
"""Returns the strategy that "auto" stands for, and the reason."""


def run_worker(
    loaded: LoadedConfig[RunConfig],
    world: World,
    *,
    resume: bool = False,
    stream: TextIO | None = None,
    choose_strategy: ChooseStrategy | None = None,
) -> RunEnded | None:
    """Train as one rank of ``world``; every rank calls this with the same run.

    A job that its launcher restarted resumes by itself. ``choose_strategy`` is needed if the
    strategy is "auto"; only rank 0 calls it.

    Returns:
        How the run ended; None if the resumed run was already complete.
    """
    stream = stream or sys.stderr
    resume = resume or world.generation > 0
    if world.store_address is not None:
        exit_with_parent()
    torch.set_num_threads(loaded.config.run.threads or world.threads)
    with catch_stop_request() as request, ExitStack() as context_stack:
        prepared = prepare(loaded.config)
        context = join_world(context_stack, loaded.config.run, world, stream)
        request.defer()
        with ExitStack() as stack, report_failures(context):
            # Which ranks share a host is known only after the rendezvous.
            loaded = _with_chosen_strategy(loaded, context, choose_strategy)
            resolved = resolve_run(loaded, context.world, prepared.model)
            ended = _run(stack, resolved, prepared, context, request, resume)
        if ended is not None and ended.again:
            request.close()
            _print_resume_hint(context)
        # Leave last: some launchers end all ranks when the first one exits.
        leave_world(context)
        return ended


def _with_chosen_strategy(
    loaded: LoadedConfig[RunConfig], context: WorkerContext, choose: ChooseStrategy | None
) -> LoadedConfig[RunConfig]:
    """Return the run with the strategy that "auto" stands for (collective).

    Raises:
        ConfigError: On all ranks, if none fits.
    """
    if not isinstance(loaded.config.strategy, AutoConfig):
        return loaded

    def make() -> str:
        if choose is None:
            raise ConfigError('strategy.kind = "auto" is for stretto train only: name a strategy')
        strategy, reason = choose(loaded.config, context.world)
        return json.dumps([strategy.model_dump(mode="json", exclude_none=True), reason])

    content, reason = json.loads(compute_on_rank_0(make, context.transport))
    if context.world.rank == 0:
        context.log_line(reason)
    return replace_table(loaded, "strategy", content, "auto")


def _run(
    stack: ExitStack,
    loaded: LoadedConfig[RunConfig],
    prepared: PreparedRun,
    context: WorkerContext,
    request: StopRequest,
    resume: bool,
) -> RunEnded | None:
    config, transport = loaded.config, context.transport
    _check_same_run(config, prepared, transport)
    generation = claim_run_folder(stack, loaded, transport, resume)
    _start_data(stack, prepared, context, f"{config.run.name}-{generation}")
    report = _open_sinks(stack, config, context, resume)
    parts = assemble(loaded, prepared, context.world, transport, report, generation)
    stack.callback(parts.strategy.close)
    first_step, note = _restore_or_init(parts, config, resume, context.log_line)
    if finished_reason := _already_finished(parts, first_step):
        if transport.rank == 0:
            context.log_line(f"{config.run.name} {finished_reason}")
        return None
    if config.run.trace:
        stack.callback(_write_trace, config.run_dir, parts, context.log_line)
    report(_started(config, parts, note))
    for reported in parts.notes:
        context.log_line(reported)
    if transport.rank == 0 and config.optim.reference_batch is not None:
        for line in derive_rates(config, parts.source.num_samples).lines():
            context.log_line(f"{line.name} {line.value}: {line.rule}")
    return train(parts, first_step, make_control_plane(context, request))


def _print_resume_hint(context: WorkerContext) -> None:
    """Print how to resume; our own launcher prints it once for all ranks, others do not."""
    if context.world.rank or context.world.launcher == LAUNCHER_NAME:
        return
    if context.world.restart_command:
        command = " ".join(context.world.restart_command)
        context.log_line(f"saved; `{command}` starts this job again, and it resumes by itself")
    else:
        context.log_line(f"saved; go on with --resume (exit code {STOPPED_EXIT_CODE})")


def _start_data(stack: ExitStack, prepared: PreparedRun, context: WorkerContext, key: str) -> None:
    mesh, world = context.world.mesh, context.world
    host = HostContext(
        world.local_rank,
        mesh.ranks_per_host[world.host],
        broadcast_text(f"{key}-{os.getpid()}", context.transport),
        lambda: barrier(context.control_transport),
    )
    for source in (prepared.source, prepared.test_source):
        stack.callback(source.close)
        source.start(host)


def _restore_or_init(
    parts: RunParts, config: RunConfig, resume: bool, log_line: Callable[[str], None]
) -> tuple[int, str]:
    """Load a checkpoint to resume or initial weights; return the first step and a note about it."""
    first_step = resume_state(parts, log=log_line) if resume else 0
    if first_step:
        return first_step, f"resumed at step {first_step}"
    if resume and parts.transport.rank == 0:
        log_line(f"no valid checkpoint in {parts.checkpoints}: starting at the beginning")
    return 0, init_from_checkpoint(parts, config.init, log_line).note


def _already_finished(parts: RunParts, first_step: int) -> str:
    if first_step >= parts.total_steps:
        return (
            f"is at step {first_step} of {parts.total_steps} already: raise train.steps or "
            "train.epochs to train on"
        )
    if first_step and parts.early_stopper.stop_reason:
        return (
            f"ended at step {first_step} already: {parts.early_stopper.stop_reason}; raise "
            "train.early_stop.patience to train on"
        )
    return ""


def _check_same_run(config: RunConfig, prepared: PreparedRun, transport: Transport) -> None:
    """Raise on all ranks if some rank has other settings or other data than rank 0."""
    facts = {
        "settings": settings_digest(config),
        "training data": prepared.source.fingerprint,
        "test data": prepared.test_source.fingerprint,
    }
    reported = [json.loads(text) for text in all_gather_text(json.dumps(facts), transport)]
    for what, advice in _MUST_MATCH.items():
        others = [
            rank
            for rank, rank_facts in enumerate(reported)
            if rank_facts[what] != reported[0][what]
        ]
        if others:
            values = f"{reported[0][what]} and {reported[others[0]][what]}"
            raise ConfigError(
                f"{ranks_text(others)} and rank 0 have different {what} ({values}): {advice}"
            )


def _open_sinks(
    stack: ExitStack, config: RunConfig, context: WorkerContext, resume: bool
) -> Callable[[Event], None]:
    """Return the function that publishes events: on rank 0 to a file, the screen and trackers."""
    if context.world.rank:
        return lambda _event: None
    set_tracker_environment(config.run.trackers, os.environ)
    event_log = JsonLines(config.run_dir / "events.jsonl", append=resume)
    trackers = open_trackers(
        config.run.trackers,
        config.run_dir,
        config.run.name,
        flat_settings(config),
        resumed=resume,
        log_line=context.log_line,
    )
    sink = fan_out([event_log, console_sink(context.stream), *trackers])
    stack.callback(sink.close)
    return sink


def _started(config: RunConfig, parts: RunParts, note: str) -> RunStarted:
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


def _write_trace(run_dir: Path, parts: RunParts, log_line: Callable[[str], None]) -> None:
    """Write the timeline; a failure to write it is logged and does not fail the run."""
    path = run_dir / "trace" / f"rank-{parts.world.rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(path, [parts.recorder.timeline()])
    except OSError as failure:
        log_line(f"the timeline {path} could not be written: {failure.strerror}")

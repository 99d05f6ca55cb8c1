"""Gather the facts of all ranks within a time limit; `stretto.doctor.checks` checks them.

The work is done in a daemon thread that may be abandoned: a disk on a dead server or a stopped
store blocks the calling thread, and no time-out of ours applies there. The main thread then reports
what is known so far.
"""

import threading
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from stretto.cluster.interfaces import resolve_store_host
from stretto.cluster.world import World
from stretto.data import ImagesConfig
from stretto.doctor.exchange_facts import AFTER_RENDEZVOUS_S, exchange_facts, open_doctor_store
from stretto.doctor.local_facts import collect_facts
from stretto.doctor.records import Examination, Facts, RunRequirements
from stretto.errors import LaunchError
from stretto.optim import make_optimizer
from stretto.run import RunConfig, prepare
from stretto.units import parse_bytes

CHECKPOINTS_ON_DISK = 3
"""The newest checkpoint, the one before, and the one that is being written."""

DEFAULT_REQUIRED_BYTES = parse_bytes("1GB")
"""Required disk space when no run file names the model."""


def requirements_of(config: RunConfig, *, model_is_known: bool) -> RunRequirements:
    """Return what ``config`` needs of the machines; ``model_is_known``: a run file was given.

    Raises:
        ConfigError: Data or model of the run is invalid.
    """
    required_bytes, required_for = DEFAULT_REQUIRED_BYTES, "a run"
    if model_is_known:
        required_bytes = CHECKPOINTS_ON_DISK * checkpoint_bytes(config)
        required_for = f"{CHECKPOINTS_ON_DISK} checkpoints"
    return RunRequirements(
        folder=str(config.run_dir),
        required_bytes=required_bytes,
        required_for=required_for,
        heartbeat_timeout_s=config.run.heartbeat_timeout_s,
        timeout_s=config.run.timeout_s,
        threads=config.run.threads,
        decoders=config.data.max_decoders if isinstance(config.data, ImagesConfig) else 0,
    )


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of the run's weights and optimizer state.

    The optimizer makes a step on meta tensors, so that all of its state is counted.
    """
    model = prepare(config).model.to("meta")
    parameters = list(model.parameters())
    optimizer = make_optimizer(config.optim, model)(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return _num_bytes(model) + sum(v.nbytes for v in kept if isinstance(v, torch.Tensor))


def _num_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


THREAD_GRACE_S = 1.0
"""Time between the last deadline of the examining thread and the moment it is abandoned."""


@dataclass(slots=True)
class _Progress:
    """Results of the examining thread so far, read by the main thread."""

    activity: str = "before it began"
    facts: Facts | None = None
    result: Examination | None = None
    failure: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def set_activity(self, activity: str) -> None:
        self.activity = activity


def gather_facts(
    world: World, detected_by: str, requirements: RunRequirements, patience_s: float
) -> Examination | None:
    """Collect and exchange facts; return those of all ranks on the coordinator, None elsewhere.

    All ranks of ``world`` call it together. The coordinator is the lowest rank that came.

    Args:
        world: This process's rank, size, host and store.
        detected_by: What the launcher was detected by.
        requirements: What the run needs of the machines.
        patience_s: Seconds to wait for other ranks; everything else takes a few seconds.

    Raises:
        LaunchError: This rank could not take part. Rank 0 returns a finding instead.
    """
    progress = _Progress()
    thread = threading.Thread(
        target=_run_gathering,
        args=(progress, world, detected_by, requirements, patience_s),
        name="stretto-doctor",
        daemon=True,
    )
    thread.start()
    ended = progress.done.wait(patience_s + AFTER_RENDEZVOUS_S + THREAD_GRACE_S)
    failure = progress.failure if ended else _stuck_error(world, progress.activity)
    if failure is None:
        return progress.result
    if world.rank == 0 and progress.facts is not None and isinstance(failure, LaunchError):
        return Examination(
            requirements, world.size, 0, {0: progress.facts}, rendezvous_error=str(failure)
        )
    raise failure


def _run_gathering(
    progress: _Progress,
    world: World,
    detected_by: str,
    requirements: RunRequirements,
    patience_s: float,
) -> None:
    try:
        _gather_and_exchange(
            progress, world, detected_by, requirements, time.monotonic() + patience_s
        )
    except RuntimeError as lost:  # raised by torch's store
        first_line = str(lost).partition("\n")[0]
        progress.failure = LaunchError(
            f"rank {world.rank} lost the store while {progress.activity}: {first_line}; did the "
            "process that holds it end?"
        )
    except Exception as failure:  # noqa: BLE001 - the caller's thread raises it
        progress.failure = failure
    finally:
        progress.done.set()


def _gather_and_exchange(
    progress: _Progress,
    world: World,
    detected_by: str,
    requirements: RunRequirements,
    deadline_s: float,
) -> None:
    """Collect this machine's facts, whatever else is wrong, then exchange them with peers."""
    world, resolve_error = _resolve_store_address(world)
    progress.facts = collect_facts(
        world, detected_by, requirements, on_activity=progress.set_activity
    )
    if resolve_error is not None:
        raise resolve_error
    progress.set_activity("joining the store")
    store = open_doctor_store(world, progress.facts, deadline_s)
    progress.set_activity("exchanging facts over the store")
    progress.result = exchange_facts(store, world, progress.facts, requirements, deadline_s)


def _resolve_store_address(world: World) -> tuple[World, LaunchError | None]:
    """Return ``world`` with a resolved store address, or ``world`` and the error."""
    try:
        return resolve_store_host(world), None
    except LaunchError as resolve_error:
        return world, resolve_error


def _stuck_error(world: World, activity: str) -> LaunchError:
    return LaunchError(
        f"rank {world.rank} is stuck while {activity}: look for a process that is stopped (state T "
        "in `ps`) on the store's host, or a disk whose server is gone"
    )

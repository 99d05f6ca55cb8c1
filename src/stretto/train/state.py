"""Save the complete state of a run to a checkpoint, and restore it.

Learning rate, data order and random numbers are functions of the step. The state is therefore the
model, the optimizer, the step and the results of evaluations. The model is saved whole: users load
it, other runs start from it, and a run on another number of ranks continues with it. Batch
statistics of each rank are saved in addition, for a run that continues on as many ranks.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.checkpoint import (
    CheckpointState,
    flatten_optimizer,
    load_newest,
    restore_optimizer_,
    save_checkpoint,
)
from stretto.comm.broadcast import as_bytes, broadcast_, broadcast_text, gather_to_rank_0
from stretto.comm.transport import Transport, all_reduce_small_
from stretto.errors import CheckpointError, StrettoError
from stretto.telemetry.events import CheckpointSaved
from stretto.train.run_parts import RunParts


@contextmanager
def consolidated_model(parts: RunParts) -> Iterator[Mapping[str, Tensor]]:
    """Make parameters and buffers equal on all ranks inside the block; all ranks enter together.

    Between steps, batch statistics are each rank's own. Evaluating and saving need one model but
    must leave no trace: a run that is evaluated more often, or stopped and resumed, must give the
    same result.

    Yields:
        This rank's own buffers, by name; they are restored after the block.
    """
    # A tied buffer appears under each of its names, as in a checkpoint.
    buffers = dict(parts.model.named_buffers(remove_duplicate=False))
    local_tensors = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    parts.strategy.consolidate()
    try:
        yield local_tensors
    finally:
        parts.strategy.restore_local()
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(local_tensors[name])


def gather_local_buffers(parts: RunParts, local_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all ranks' own buffers under their checkpoint names; empty except on rank 0.

    All ranks call this together, inside `consolidated_model`. Only persistent buffers are returned,
    and only those that `consolidated_model` changed on some rank. Masks and other constants would
    otherwise be saved once per rank.
    """
    full_state = parts.model.state_dict()
    names = [name for name in local_tensors if name in full_state]
    if not names:
        return {}
    changed = torch.tensor(
        [float(_differ(local_tensors[name], full_state[name])) for name in names]
    )
    all_reduce_small_(changed, parts.transport)
    names = [name for name, num_ranks in zip(names, changed.tolist(), strict=True) if num_ranks]
    if not names:
        return {}
    of_ranks = gather_to_rank_0([local_tensors[name] for name in names], parts.transport)
    return {
        f"{buffers_prefix(rank)}/{name}": buffer
        for rank, buffers in enumerate(of_ranks)
        for name, buffer in zip(names, buffers, strict=True)
    }


def gather_strategy_state(parts: RunParts) -> dict[str, Tensor]:
    """Return the strategy's local state of all ranks by checkpoint name; empty except on rank 0."""
    local_tensors = parts.strategy.local_state()
    of_ranks = (
        gather_to_rank_0(list(local_tensors.values()), parts.transport) if local_tensors else []
    )
    return {
        f"{strategy_prefix(rank)}/{name}": tensor
        for rank, tensors in enumerate(of_ranks)
        for name, tensor in zip(local_tensors, tensors, strict=True)
    }


def strategy_prefix(rank: int) -> str:
    """Return the prefix of a rank's strategy state in a checkpoint."""
    return f"rank-{rank}/strategy"


def buffers_prefix(rank: int) -> str:
    """Return the prefix of a rank's own buffers in a checkpoint."""
    return f"rank-{rank}/buffers"


def _differ(one: Tensor, other: Tensor) -> bool:
    # Compare bytes, because -0.0 equals 0.0 and NaN does not equal itself.
    return not torch.equal(as_bytes([one]), as_bytes([other]))


def save_state(parts: RunParts, next_step: int) -> None:
    """Let rank 0 save the state of all ranks; nothing is changed. All ranks call this together."""
    with consolidated_model(parts) as local_buffers:
        _refuse_nonfinite_weights(parts, next_step)
        per_rank_state = gather_local_buffers(parts, local_buffers) | gather_strategy_state(parts)
        optimizer = parts.strategy.full_optimizer_state()
        if parts.transport.rank or parts.checkpoints is None:
            return
        with parts.recorder.span("checkpoint", "compute"):
            state = capture_state(parts, next_step, optimizer, per_rank_state)
            saved = save_checkpoint(parts.checkpoints, state, generation=parts.generation)
    parts.report(CheckpointSaved(next_step, str(saved.path), saved.num_bytes, saved.seconds))


def _refuse_nonfinite_weights(parts: RunParts, next_step: int) -> None:
    """Raise on all ranks if the weights, which are equal on all ranks, are not finite."""
    if name := first_nonfinite_parameter(parts.model):
        raise StrettoError(
            f"{name} is not finite after step {next_step}, on all ranks alike, and was not "
            f"saved: lower optim.lr or lengthen optim.warmup_steps, then --resume"
        )


def first_nonfinite_parameter(model: nn.Module) -> str:
    """Return the name of the first parameter that is not finite, or ""."""
    named = model.named_parameters()
    return next((name for name, p in named if not bool(torch.isfinite(p).all())), "")


def capture_state(
    parts: RunParts, next_step: int, optimizer: Optimizer, per_rank_state: Mapping[str, Tensor]
) -> CheckpointState:
    """Return the state with which a run continues at ``next_step``."""
    named = dict(parts.model.named_parameters())
    tensors, groups = flatten_optimizer(optimizer, named)
    tensors_by_name = {f"model/{name}": value for name, value in parts.model.state_dict().items()}
    tensors_by_name |= {f"optimizer/{name}": value for name, value in tensors.items()}
    tensors_by_name |= per_rank_state
    facts = {
        "optimizer": groups,
        "strategy": parts.strategy.state_dict(),
        "ranks_per_host": list(parts.world.mesh.ranks_per_host),
        "epoch": next_step // parts.epoch_steps,
        "early_stop": parts.early_stopper.state_dict(),
        "loss_scale": parts.loss_scale.state_dict(),
        "random_numbers": "a function of seed, step, micro-batch and rank",
        "fixed": parts.fixed_settings,
        "data": _data_fingerprints(parts),
    }
    return CheckpointState(next_step, tensors_by_name, facts)


def resume_state(parts: RunParts, log: Callable[[str], None]) -> int:
    """Restore the newest valid checkpoint; return the next step, or 0 if there is none.

    Rank 0 reads the files and broadcasts every byte, so disks need not be shared. All ranks call
    this together.
    """
    state = None
    if parts.transport.rank == 0 and parts.checkpoints is not None:
        state = load_newest(parts.checkpoints, log=log)
    shared = _broadcast_state(state, parts.transport)
    if shared is None:
        return 0
    restore_state_(parts, shared)
    return shared.step


def roll_back_(parts: RunParts, log: Callable[[str], None]) -> int | None:
    """Restore the newest valid checkpoint again; return its step, or None if there is none.

    The loss scale keeps its present value, because the earlier one would overflow again.
    """
    loss_scale = parts.loss_scale.state_dict()
    step = resume_state(parts, log)
    parts.loss_scale.load_state_dict(loss_scale)
    return step or None


def restore_state_(parts: RunParts, state: CheckpointState) -> None:
    """Load ``state`` into the model, optimizer, strategy, early stopper and loss scale."""
    _check_same_run(parts, state)
    _check_same_data(parts, state)
    parts.strategy.consolidate()
    same_size = sum(state.facts["ranks_per_host"]) == parts.transport.size
    local_buffers = state.tensors_under(buffers_prefix(parts.transport.rank)) if same_size else {}
    try:
        parts.model.load_state_dict(state.tensors_under("model") | local_buffers)
    except RuntimeError as wrong:
        raise CheckpointError(
            f"the checkpoint of step {state.step} does not fit the model: {wrong}"
        ) from wrong
    named = dict(parts.model.named_parameters())
    full_optimizer = parts.strategy.full_optimizer_state()
    restore_optimizer_(
        full_optimizer, named, state.tensors_under("optimizer"), state.facts["optimizer"]
    )
    parts.strategy.load_full_optimizer_state(full_optimizer)
    parts.strategy.load_state_dict(state.facts["strategy"])
    strategy_state = state.tensors_under(strategy_prefix(parts.transport.rank)) if same_size else {}
    parts.strategy.load_local_state(strategy_state)
    parts.early_stopper.load_state_dict(state.facts.get("early_stop", {}))
    parts.loss_scale.load_state_dict(state.facts.get("loss_scale", {}))


def _check_same_run(parts: RunParts, state: CheckpointState) -> None:
    """Refuse to continue with other samples, another model or another optimizer."""
    then, now = state.facts["fixed"], json.loads(json.dumps(parts.fixed_settings))
    # A changed ``kind`` also changes other keys, so it is reported first. A key that the
    # checkpoint lacks was added by a later version; its default is the earlier behaviour.
    for key in sorted(then, key=lambda key: (not key.endswith(".kind"), key)):
        if then[key] != now.get(key):
            raise CheckpointError(
                f"the checkpoint was written with {key} = {then[key]!r}, the run has "
                f"{now.get(key)!r}: set it back to resume, or start a new run under another name"
            )


def _check_same_data(parts: RunParts, state: CheckpointState) -> None:
    """Refuse to continue with other samples; their location does not matter."""
    now = _data_fingerprints(parts)
    then = state.facts.get("data", now)  # checkpoints of earlier versions lack it
    for what in now:
        if then[what] != now[what]:
            raise CheckpointError(
                f"the {what} data has changed since the checkpoint of step {state.step}: it was "
                f"{then[what]}; it is {now[what]}: put the files back as they were to resume, or "
                f"start a new run under another name (init.checkpoint takes the weights along)"
            )


def _data_fingerprints(parts: RunParts) -> dict[str, str]:
    return {"training": parts.source.fingerprint, "test": parts.test_source.fingerprint}


def _broadcast_state(state: CheckpointState | None, transport: Transport) -> CheckpointState | None:
    header = {}
    if state is not None:
        shapes = [[name, str(t.dtype), list(t.shape)] for name, t in state.tensors.items()]
        header = {"step": state.step, "facts": dict(state.facts), "tensors": shapes}
    header = json.loads(broadcast_text(json.dumps(header), transport))
    if not header:
        return None
    tensors = dict(state.tensors) if state is not None else _empty_tensors(header["tensors"])
    broadcast_(tensors.values(), transport)
    return CheckpointState(header["step"], tensors, header["facts"])


def _empty_tensors(shapes: list[tuple[str, str, list[int]]]) -> dict[str, Tensor]:
    """Return empty tensors to receive the broadcast of rank 0."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, dtype, shape in shapes
    }

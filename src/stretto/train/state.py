"""The whole state of a run, to a checkpoint and back.

Learning rate, data order and random numbers are functions of the step, so model, optimizer, the
step and how evaluations went are all there is. The model is saved whole: what users load, other
runs begin with and another number of ranks goes on from. Batch statistics that were each rank's
own are saved beside it, for a run that goes on with as many ranks.
"""

import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.checkpoint import State, flatten_optimizer, load_newest, restore_optimizer_, save
from stretto.comm.channel import Channel
from stretto.comm.spread import spread_from_rank_0_, spread_text
from stretto.errors import CheckpointError, StrettoError
from stretto.telemetry.events import CheckpointSaved
from stretto.train.parts import Parts
from stretto.train.settled import (
    own_of_all_ranks,
    own_of_rank,
    settled,
    strategy_of_all_ranks,
    strategy_of_rank,
)


def save_state(parts: Parts, next_step: int) -> None:
    """Let rank 0 write the state of all ranks, and change nothing; all ranks call this together."""
    with settled(parts) as own:
        _refuse_not_finite(parts, next_step)
        beside = own_of_all_ranks(parts, own) | strategy_of_all_ranks(parts)
        optimizer = parts.strategy.whole_optimizer()
        if parts.channel.rank or parts.checkpoints is None:
            return
        with parts.recorder.span("checkpoint", "compute"):
            state = capture(parts, next_step, optimizer, beside)
            saved = save(parts.checkpoints, state, generation=parts.generation)
    parts.report(CheckpointSaved(next_step, str(saved.path), saved.num_bytes, saved.seconds))


def _refuse_not_finite(parts: Parts, next_step: int) -> None:
    """Keep what is lost out of the checkpoints; parameters are equal, so all ranks end alike."""
    if name := first_not_finite(parts.model):
        raise StrettoError(
            f"{name} is not finite after step {next_step}, on all ranks alike, and was not "
            f"saved: lower optim.lr or lengthen optim.warmup_steps, then --resume"
        )


def first_not_finite(model: nn.Module) -> str:
    """Return the name of the first parameter that is not finite; empty where all are."""
    named = model.named_parameters()
    return next((name for name, p in named if not bool(torch.isfinite(p).all())), "")


def capture(
    parts: Parts, next_step: int, optimizer: Optimizer, beside: Mapping[str, Tensor]
) -> State:
    """Return everything a run needs to go on at ``next_step``: one model, what lies beside it."""
    named = dict(parts.model.named_parameters())
    tensors, groups = flatten_optimizer(optimizer, named)
    owned = {f"model/{name}": value for name, value in parts.model.state_dict().items()}
    owned |= {f"optimizer/{name}": value for name, value in tensors.items()}
    owned |= beside
    facts = {
        "optimizer": groups,
        "strategy": parts.strategy.state_dict(),
        "ranks_per_host": list(parts.world.mesh.ranks_per_host),
        "epoch": next_step // parts.epoch_steps,
        "early_stop": parts.watch.state_dict(),
        "loss_scale": parts.scale.state_dict(),
        "random_numbers": "a function of seed, step, micro-batch and rank",
        "fixed": parts.fixed,
        "data": _fingerprints(parts),
    }
    return State(next_step, owned, facts)


def resume_state(parts: Parts, log: Callable[[str], None]) -> int:
    """Take up the newest valid checkpoint; return the step to go on with, 0 when there is none.

    Rank 0 reads and the others get every byte from it: disks need not be shared. All ranks
    call this together.
    """
    state = None
    if parts.channel.rank == 0 and parts.checkpoints is not None:
        state = load_newest(parts.checkpoints, log=log)
    shared = _spread_state(state, parts.channel)
    if shared is None:
        return 0
    restore_(parts, shared)
    return shared.step


def go_back_(parts: Parts, log: Callable[[str], None]) -> int | None:
    """Take up the newest valid checkpoint again; return its step, None where there is none.

    The scale of the loss stays what it has become: what it was would overflow again.
    """
    scale = parts.scale.state_dict()
    step = resume_state(parts, log)
    parts.scale.load_state_dict(scale)
    return step or None


def restore_(parts: Parts, state: State) -> None:
    """Put ``state`` into the model, the optimizer, the strategy and the watch."""
    _check_same_run(parts, state)
    _check_same_data(parts, state)
    parts.strategy.settle()
    same_size = sum(state.facts["ranks_per_host"]) == parts.channel.size
    own = state.under(own_of_rank(parts.channel.rank)) if same_size else {}
    try:
        parts.model.load_state_dict(state.under("model") | own)
    except RuntimeError as wrong:
        raise CheckpointError(
            f"the checkpoint of step {state.step} does not fit the model: {wrong}"
        ) from wrong
    named = dict(parts.model.named_parameters())
    whole = parts.strategy.whole_optimizer()
    restore_optimizer_(whole, named, state.under("optimizer"), state.facts["optimizer"])
    parts.strategy.take_optimizer(whole)
    parts.strategy.load_state_dict(state.facts["strategy"])
    kept = state.under(strategy_of_rank(parts.channel.rank)) if same_size else {}
    parts.strategy.load_own_state(kept)
    parts.watch.load_state_dict(state.facts.get("early_stop", {}))
    parts.scale.load_state_dict(state.facts.get("loss_scale", {}))


def _check_same_run(parts: Parts, state: State) -> None:
    """Refuse to go on as another run: with other samples, another model or another optimizer."""
    then, now = state.facts["fixed"], json.loads(json.dumps(parts.fixed))
    # Another kind brings other keys: it is what changed. A key that was not there then has come
    # with a later version, whose default is what there was.
    for key in sorted(then, key=lambda key: (not key.endswith(".kind"), key)):
        if then[key] != now.get(key):
            raise CheckpointError(
                f"the checkpoint was written with {key} = {then[key]!r}, the run has "
                f"{now.get(key)!r}: set it back to resume, or start a new run under another name"
            )


def _check_same_data(parts: Parts, state: State) -> None:
    """Refuse to go on with other samples; where they lie is not asked."""
    now = _fingerprints(parts)
    then = state.facts.get("data", now)  # earlier checkpoints do not tell
    for what in now:
        if then[what] != now[what]:
            raise CheckpointError(
                f"the {what} data has changed since the checkpoint of step {state.step}: it was "
                f"{then[what]}; it is {now[what]}: put the files back as they were to resume, or "
                f"start a new run under another name (init.checkpoint takes the weights along)"
            )


def _fingerprints(parts: Parts) -> dict[str, str]:
    return {"training": parts.source.fingerprint, "test": parts.test_source.fingerprint}


def _spread_state(state: State | None, channel: Channel) -> State | None:
    head = {}
    if state is not None:
        shapes = [[name, str(t.dtype), list(t.shape)] for name, t in state.tensors.items()]
        head = {"step": state.step, "facts": dict(state.facts), "tensors": shapes}
    head = json.loads(spread_text(json.dumps(head), channel))
    if not head:
        return None
    tensors = dict(state.tensors) if state is not None else _rooms(head["tensors"])
    spread_from_rank_0_(tensors.values(), channel)
    return State(head["step"], tensors, head["facts"])


def _rooms(shapes: list[tuple[str, str, list[int]]]) -> dict[str, Tensor]:
    """Return empty tensors for what rank 0 is about to send."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, dtype, shape in shapes
    }

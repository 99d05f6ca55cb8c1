"""One step's pieces: which samples, forward and backward in micro-batches, the update."""

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from stretto.data.loader import LoadedShare
from stretto.data.order import Share, step_share
from stretto.errors import StrettoError
from stretto.model.loss import per_sample_loss
from stretto.strategy import Agreed
from stretto.telemetry.wording import counted
from stretto.train.loose import AnyAgreement
from stretto.train.parts import Parts
from stretto.train.precision import HALF, Precision

_TOO_FEW = "Expected more than 1 value per channel when training"
"""How torch's batch norm begins to say that it was given a single one."""


def shares(parts: Parts, first_step: int) -> Iterator[Share]:
    """Yield this rank's samples of each step from ``first_step`` on: the step is all the state."""
    for step in range(first_step, parts.total_steps):
        epoch, step_in_epoch = divmod(step, parts.pass_steps)
        yield step_share(
            step_in_epoch,
            batch=parts.config.batch,
            rank=parts.channel.rank,
            size=parts.channel.size,
            num_samples=parts.source.num_samples,
            seed=parts.seed,
            epoch=epoch,
        )


def accumulate(
    parts: Parts, step: int, batch: LoadedShare, lr: float, agreement: AnyAgreement
) -> Tensor:
    """Forward and backward over this rank's share; return the sum of its losses.

    The loss is divided here, once, by the number of samples that all ranks together have: summed
    over micro-batches and ranks, the gradients are those of the mean over the global batch. A rank
    without samples adds nothing.
    """
    agreement.begin(step, len(batch.inputs))
    for group in parts.optimizer.param_groups:
        group["lr"] = lr  # before backward: a strategy may update as gradients arrive
    total = torch.zeros((), dtype=torch.float64, device=batch.inputs.device)
    last = parts.config.pieces(parts.channel.size) - 1
    for micro, (inputs, targets) in enumerate(micro_batches(parts, batch)):
        parts.strategy.begin(step, micro, micro == last, lr)
        loss = _loss(parts, step, micro, inputs, targets) if len(inputs) else None
        if loss is not None:
            total += loss.detach()
        if micro == last:
            agreement.judge(total)
        if loss is not None:
            with parts.recorder.span("agree", "wait", step=step):
                num_samples = agreement.settled().num_samples
            with parts.recorder.span("backward", "compute", step=step):
                (loss * (parts.scale.value / num_samples)).backward()
    return total


def micro_batches(parts: Parts, batch: LoadedShare) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pieces of this rank's share, inputs and targets; some may be empty."""
    sizes = parts.config.piece_sizes(len(batch.inputs), parts.channel.size)
    return zip(batch.inputs.split(sizes), batch.targets.split(sizes), strict=True)


def _loss(parts: Parts, step: int, micro: int, inputs: Tensor, targets: Tensor) -> Tensor:
    seed_randomness(parts.seed, step, micro, parts.channel.rank)
    with parts.recorder.span("forward", "compute", step=step):
        try:
            outputs = forward(parts, inputs)
        except ValueError as wrong:
            if not str(wrong).startswith(_TOO_FEW):
                raise
            raise _too_few_for_batch_norm(parts, step, len(inputs)) from wrong
        return per_sample_loss(outputs, targets, parts.config.label_smoothing).sum()


def forward(parts: Parts, inputs: Tensor) -> Tensor:
    """Return the model's outputs, computed in the run's precision."""
    return forward_in(parts.config.precision, parts.model, inputs)


def forward_in(precision: Precision, model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a model's outputs, computed in ``precision``."""
    half = HALF.get(precision)
    with torch.autocast(inputs.device.type, half, enabled=half is not None):
        outputs: Tensor = model(inputs)
    return outputs


def _too_few_for_batch_norm(parts: Parts, step: int, num_samples: int) -> StrettoError:
    config, rank, size = parts.config, parts.channel.rank, parts.channel.size
    left = parts.samples_of(step)
    if left < config.batch:
        why = f"The last step of a pass has {left} of {config.batch} samples"
        advice = "drop them from the data, or change train.batch or the number of workers"
    else:
        why = f"Every step has {counted(config.batch, 'sample')}"
        advice = "take a larger train.batch, larger micro-batches, or fewer workers"
    return StrettoError(
        f"step {step + 1}, rank {rank}: batch norm cannot learn from {num_samples} sample at a "
        f"time: one value has no variance. {why}, for {counted(size, 'worker')}: {advice}"
    )


def update(parts: Parts, step: int, agreed: Agreed) -> None:
    """Apply what gradients the strategy has left, clipped where asked for, and drop them."""
    if agreed.done:
        return
    with parts.recorder.span("update", "compute", step=step):
        if parts.config.clip_norm is not None:
            agreed.clip_(parts.config.clip_norm)
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)


def seed_randomness(seed: int, step: int, micro: int, rank: int) -> None:
    """Make dropout and the like a pure function of where we are.

    No generator state has to be saved, and a resumed run draws the same numbers.
    """
    words = np.random.SeedSequence((seed, step, micro, rank)).generate_state(2, np.uint64)
    torch.manual_seed(int(words[0]) >> 1)
    random.seed(int(words[1]))
    np.random.seed(int(words[1]) & 0xFFFFFFFF)

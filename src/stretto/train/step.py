"""The parts of a training step: sample indices, forward and backward in micro-batches, update."""

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from stretto.data.loader import LoadedSamples
from stretto.data.order import RankSamples, rank_samples
from stretto.errors import StrettoError
from stretto.models import per_sample_loss
from stretto.strategies import StepGradients
from stretto.telemetry.event_text import count_text
from stretto.train.precision import forward_in_precision
from stretto.train.run_parts import RunParts
from stretto.train.step_consensus import AnyConsensus

_BATCH_NORM_ERROR = "Expected more than 1 value per channel when training"
"""Start of torch's error message if batch norm gets a single value per channel."""


def iterate_rank_samples(parts: RunParts, first_step: int) -> Iterator[RankSamples]:
    """Yield this rank's samples of each step from ``first_step`` on; the step is the only state."""
    for step in range(first_step, parts.total_steps):
        epoch, step_in_epoch = divmod(step, parts.pass_steps)
        yield rank_samples(
            step_in_epoch,
            batch=parts.config.batch,
            rank=parts.transport.rank,
            size=parts.transport.size,
            num_samples=parts.source.num_samples,
            seed=parts.seed,
            epoch=epoch,
        )


def forward_backward(
    parts: RunParts, step: int, batch: LoadedSamples, lr: float, consensus: AnyConsensus
) -> Tensor:
    """Run forward and backward over this rank's samples; return the sum of its losses.

    Each loss is divided by the number of samples on all ranks together. Summed over micro-batches
    and ranks, the gradients are then those of the mean over the global batch. A rank without
    samples contributes nothing.
    """
    consensus.begin(step, len(batch.inputs))
    for group in parts.optimizer.param_groups:
        group["lr"] = lr  # set before backward, because a strategy may update during it
    total = torch.zeros((), dtype=torch.float64, device=batch.inputs.device)
    last = parts.config.num_micro_batches(parts.transport.size) - 1
    for micro, (inputs, targets) in enumerate(micro_batches(parts, batch)):
        parts.strategy.begin(step, micro, micro == last, lr)
        loss = _loss(parts, step, micro, inputs, targets) if len(inputs) else None
        if loss is not None:
            total += loss.detach()
        if micro == last:
            consensus.check_finite(total)
        if loss is not None:
            with parts.recorder.span("agree", "wait", step=step):
                num_samples = consensus.result().num_samples
            with parts.recorder.span("backward", "compute", step=step):
                (loss * (parts.loss_scale.value / num_samples)).backward()
    return total


def micro_batches(parts: RunParts, batch: LoadedSamples) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of each micro-batch of this rank; some may be empty."""
    sizes = parts.config.micro_batch_sizes(len(batch.inputs), parts.transport.size)
    return zip(batch.inputs.split(sizes), batch.targets.split(sizes), strict=True)


def _loss(parts: RunParts, step: int, micro: int, inputs: Tensor, targets: Tensor) -> Tensor:
    seed_randomness(parts.seed, step, micro, parts.transport.rank)
    with parts.recorder.span("forward", "compute", step=step):
        try:
            outputs = forward(parts, inputs)
        except ValueError as wrong:
            if not str(wrong).startswith(_BATCH_NORM_ERROR):
                raise
            raise _too_few_for_batch_norm(parts, step, len(inputs)) from wrong
        return per_sample_loss(outputs, targets, parts.config.label_smoothing).sum()


def forward(parts: RunParts, inputs: Tensor) -> Tensor:
    """Return the model's outputs, computed in the run's precision."""
    return forward_in_precision(parts.config.precision, parts.model, inputs)


def _too_few_for_batch_norm(parts: RunParts, step: int, num_samples: int) -> StrettoError:
    config, rank, size = parts.config, parts.transport.rank, parts.transport.size
    left = parts.num_samples_in_step(step)
    if left < config.batch:
        why = f"The last step of a pass has {left} of {config.batch} samples"
        advice = "drop them from the data, or change train.batch or the number of workers"
    else:
        why = f"Every step has {count_text(config.batch, 'sample')}"
        advice = "take a larger train.batch, larger micro-batches, or fewer workers"
    return StrettoError(
        f"step {step + 1}, rank {rank}: batch norm cannot learn from {num_samples} sample at a "
        f"time: one value has no variance. {why}, for {count_text(size, 'worker')}: {advice}"
    )


def update(parts: RunParts, step: int, sync_result: StepGradients) -> None:
    """Clip gradients if requested, step the optimizer and drop the gradients.

    It does nothing if the strategy has already applied the gradients.
    """
    if sync_result.is_applied:
        return
    with parts.recorder.span("update", "compute", step=step):
        if parts.config.clip_norm is not None:
            sync_result.clip_(parts.config.clip_norm)
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)


def seed_randomness(seed: int, step: int, micro: int, rank: int) -> None:
    """Seed all generators, so that dropout is a function of seed, step, micro-batch and rank.

    No generator state has to be saved, and a resumed run draws the same numbers.
    """
    seeds = np.random.SeedSequence((seed, step, micro, rank)).generate_state(2, np.uint64)
    torch.manual_seed(int(seeds[0]) >> 1)
    random.seed(int(seeds[1]))
    np.random.seed(int(seeds[1]) & 0xFFFFFFFF)

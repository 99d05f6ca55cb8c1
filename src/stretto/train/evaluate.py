"""Evaluation on all ranks, and re-estimation of batch-norm statistics.

Running averages lag behind weights that change fast, and those of a small micro-batch are noisy.
`reestimate_batch_norm` computes new statistics from a few training batches with the current
weights. It leaves no trace: the samples are a function of the step alone, and the caller restores
each rank's buffers (`consolidated_model`).

The variance of all samples is the mean of the batches' variances *plus* the variance of their means
(the law of total variance, weighted by samples). The mean of variances alone is too small, most of
all for small batches. With both parts the result equals that of a single rank that saw the same
batches.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stretto.comm.transport import all_reduce_small_
from stretto.data.loader import Prefetcher
from stretto.data.order import RankSamples, samples_at, steps_per_epoch
from stretto.data.sample_source import SampleSource
from stretto.models import per_sample_accuracy, per_sample_loss
from stretto.telemetry.events import EvalDone
from stretto.train.config import TrainConfig
from stretto.train.precision import Precision, forward_in_precision
from stretto.train.run_parts import RunParts
from stretto.train.state import consolidated_model
from stretto.train.step import forward, seed_randomness


@torch.no_grad()
def reestimate_batch_norm(parts: RunParts, steps_done: int) -> None:
    """Set batch-norm statistics from some training samples, after ``steps_done`` steps.

    All ranks call this together, inside `consolidated_model`, and end with equal batch-norm
    buffers. Other buffers keep their values. A model without batch norm is not run at all.
    """
    sampling = StatisticsSampling(
        parts.config, parts.source, parts.seed, steps_done, parts.transport.size
    )
    compute_batch_statistics(
        parts.model,
        sampling,
        [parts.transport.rank],
        lambda inputs: forward(parts, inputs),
        lambda sums: all_reduce_small_(sums, parts.transport),
    )


@dataclass(frozen=True, slots=True)
class StatisticsSampling:
    """The choice of training samples for new statistics."""

    config: TrainConfig
    source: SampleSource
    seed: int
    steps_done: int
    """Training steps done before."""
    size: int

    def rank_samples(self, rank: int) -> Iterator[RankSamples]:
        """Yield the micro-batches of ``rank``, from an order that depends on ``steps_done``.

        Micro-batches are numbered over all ranks, and the number determines the samples. With
        another number of ranks but the same total, the same batches are read.
        """
        num_samples = self.source.num_samples
        share = -(-self.config.batch // self.size)
        length = -(-share // self.config.num_micro_batches(self.size))
        pass_steps = steps_per_epoch(num_samples, self.config.batch)
        for index in range(self.config.statistics_batches):
            start = self.batch_number(index, rank) * length
            epoch_indices = np.arange(start, start + length, dtype=np.int64) % num_samples
            # Training epochs count from 0: an order with a negative epoch is used only here.
            samples = samples_at(
                epoch_indices, num_samples=num_samples, seed=self.seed, epoch=-self.steps_done - 1
            )
            yield RankSamples(samples, epoch=max(self.steps_done - 1, 0) // pass_steps)

    def batch_number(self, index: int, rank: int) -> int:
        """Return the number of a rank's micro-batch among those of all ranks."""
        return index * self.size + rank


def compute_batch_statistics(
    model: nn.Module,
    sampling: StatisticsSampling,
    ranks: Iterable[int],
    run_forward: Callable[[Tensor], Tensor],
    all_reduce: Callable[[Tensor], None] = lambda _sums: None,
) -> None:
    """Set batch-norm statistics from the samples of ``ranks`` here and of other processes.

    ``all_reduce`` sums a tensor over all processes, in place.
    """
    norms = (layer for layer in model.modules() if isinstance(layer, _BatchNorm))
    layers = [_BatchNormSums(layer) for layer in norms if layer.running_mean is not None]
    if not layers:
        return
    with _preserved_buffers_and_rng(model), _recording_sums(layers):
        model.train()
        for rank in ranks:
            with Prefetcher(sampling.source, sampling.rank_samples(rank)) as batches:
                for index, batch in enumerate(batches):
                    if len(batch.inputs):
                        seed_randomness(
                            sampling.seed,
                            sampling.steps_done,
                            sampling.batch_number(index, rank),
                            0,
                        )
                        run_forward(batch.inputs)
    sums = torch.cat([each.flattened().cpu() for each in layers])
    all_reduce(sums)
    for each, total in zip(layers, sums.split([each.length for each in layers]), strict=True):
        each.write_back(total)


@dataclass(slots=True, eq=False)
class _BatchNormSums:
    """Sums over the inputs of one batch norm: number of values per channel, values, squares.

    They are float64, so that the square of a mean can be subtracted without loss.
    """

    layer: _BatchNorm
    count: float = 0.0
    moments: Tensor | float = 0.0
    """[2, channels] after the first batch."""

    def add(self, _layer: nn.Module, inputs: tuple[Tensor, ...], _outputs: object) -> None:
        """Forward hook: add the batch, whose statistics are the running ones with momentum 1."""
        mean, variance = (s.double() for s in self._running())
        count = inputs[0].numel() // len(mean)
        # The running variance is the unbiased estimate: divided by count - 1.
        squares = variance * ((count - 1) / count) + mean.square()
        self.count += count
        self.moments = self.moments + count * torch.stack([mean, squares])

    @property
    def length(self) -> int:
        """Number of elements in `flattened`."""
        return 1 + 2 * len(self._running()[0])

    def flattened(self) -> Tensor:
        """Return all sums as one vector that ranks can add up."""
        flattened = self._running()[0].new_zeros(self.length, dtype=torch.float64)
        flattened[0] = self.count
        flattened[1:].view(2, -1).add_(self.moments)
        return flattened

    def write_back(self, total: Tensor) -> None:
        """Set the layer's statistics from the sums of all ranks; without samples keep them."""
        count = float(total[0])
        if not count:
            return
        mean, squares = total[1:].view(2, -1) / count
        variance = (squares - mean.square()).clamp_(min=0) * (count / max(count - 1, 1))
        for running, value in zip(self._running(), (mean, variance), strict=True):
            running.copy_(value)

    def _running(self) -> tuple[Tensor, Tensor]:
        mean, variance = self.layer.running_mean, self.layer.running_var
        assert mean is not None, "a layer without statistics was selected"
        assert variance is not None, "a layer has both statistics or none"
        return mean, variance


@contextmanager
def _recording_sums(layers: Sequence[_BatchNormSums]) -> Iterator[None]:
    """Record every batch that goes through the layers inside the block."""
    hooks = [each.layer.register_forward_hook(each.add) for each in layers]
    momenta = [each.layer.momentum for each in layers]
    try:
        for each in layers:
            each.layer.momentum = 1.0
            each.layer.reset_running_stats()  # a value that is not finite would survive momentum 1
        yield
    finally:
        for each, hook, momentum in zip(layers, hooks, momenta, strict=True):
            hook.remove()
            each.layer.momentum = momentum


@contextmanager
def _preserved_buffers_and_rng(model: nn.Module) -> Iterator[None]:
    """Restore all buffers and the states of all random number generators after the block."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng({b.device.index for b, _ in buffers if b.is_cuda}):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for buffer, before in buffers:
            buffer.copy_(before)


_BATCH = 256
"""Samples per forward; without gradients memory is small, and the result does not depend on it."""


@torch.no_grad()
def evaluate(parts: RunParts, steps_done: int) -> EvalDone:
    """Compute loss and accuracy on held-out data after ``steps_done`` steps; all ranks together.

    If replicas differ, their mean is evaluated, and in addition each replica on its rank's samples.
    """
    has_local_models = parts.strategy.replicas_differ
    sums = torch.zeros(2, 3, dtype=torch.float64)
    with parts.recorder.span("evaluate", "compute"):
        with consolidated_model(parts):
            if parts.config.statistics == "reestimate":
                reestimate_batch_norm(parts, steps_done)
            sums[0] = _sum_rank_metrics(parts)
            consensus_distance = parts.strategy.consensus_distance()
        if has_local_models:  # afterwards, since consolidating completes averages under way
            sums[1] = _sum_rank_metrics(parts)
    all_reduce_small_(sums, parts.transport)
    (loss, accuracy), (local_loss, local_accuracy) = (
        sums[:, :2] / sums[:, 2:].clamp(min=1)
    ).tolist()
    return EvalDone(
        step=steps_done,
        epoch=(steps_done - 1) // parts.epoch_steps,
        loss=loss,
        accuracy=accuracy,
        local_loss=local_loss if has_local_models else None,
        local_accuracy=local_accuracy if has_local_models else None,
        consensus_distance=consensus_distance,
    )


def _sum_rank_metrics(parts: RunParts) -> Tensor:
    """Return the sums of losses and correct answers, and the number, of this rank's samples."""
    sample_indices = np.arange(
        parts.transport.rank, parts.test_source.num_samples, parts.transport.size
    )
    return sum_metrics(parts.model, parts.test_source, sample_indices, parts.config.precision)


def sum_metrics(
    model: nn.Module, source: SampleSource, samples: NDArray[np.int64], precision: Precision
) -> Tensor:
    """Return the sums of losses and correct answers, and the number, of the readable samples."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for start in range(0, len(samples), _BATCH):
        inputs, targets = (t.to(device) for t in source.batch(samples[start : start + _BATCH]))
        if not len(inputs):
            continue
        outputs = forward_in_precision(precision, model, inputs)
        sums[0] += per_sample_loss(outputs, targets).double().sum().cpu()
        sums[1] += per_sample_accuracy(outputs, targets).double().sum().cpu()
        sums[2] += len(inputs)  # may be fewer than requested: a file may be unreadable
    model.train()
    return sums

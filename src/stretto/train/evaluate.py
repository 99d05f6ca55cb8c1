"""Evaluation, shared out among the ranks."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.comm.small import add_up_
from stretto.data.source import Source
from stretto.model.loss import correct, per_sample_loss
from stretto.telemetry.events import EvalDone
from stretto.train.parts import Parts
from stretto.train.precision import Precision
from stretto.train.settled import settled
from stretto.train.statistics import reestimate
from stretto.train.step import forward_in

_BATCH = 256
"""Samples at once; without gradients memory is small, and the result does not depend on it."""


@torch.no_grad()
def evaluate(parts: Parts, done: int) -> EvalDone:
    """Measure loss and accuracy on held-out data after ``done`` steps; all ranks together.

    Where ranks have models of their own, their mean is measured, and each of them on its share.
    """
    own = parts.strategy.own_models
    sums = torch.zeros(2, 3, dtype=torch.float64)
    with parts.recorder.span("evaluate", "compute"):
        with settled(parts):
            if parts.config.statistics == "reestimate":
                reestimate(parts, done)
            sums[0] = _tested(parts)
            apart = parts.strategy.apart()
        if own:  # after that: averages that were under way are made
            sums[1] = _tested(parts)
    add_up_(sums, parts.channel)
    (loss, accuracy), (own_loss, own_accuracy) = (sums[:, :2] / sums[:, 2:].clamp(min=1)).tolist()
    return EvalDone(
        step=done,
        epoch=(done - 1) // parts.epoch_steps,
        loss=loss,
        accuracy=accuracy,
        own_loss=own_loss if own else None,
        own_accuracy=own_accuracy if own else None,
        apart=apart,
    )


def _tested(parts: Parts) -> Tensor:
    """Return the sums of losses, right answers and samples of this rank's share."""
    mine = np.arange(parts.channel.rank, parts.test_source.num_samples, parts.channel.size)
    return tested(parts.model, parts.test_source, mine, parts.config.precision)


def tested(
    model: nn.Module, source: Source, samples: NDArray[np.int64], precision: Precision
) -> Tensor:
    """Return the sums of losses, right answers and samples of those that could be read."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for start in range(0, len(samples), _BATCH):
        inputs, targets = (t.to(device) for t in source.batch(samples[start : start + _BATCH]))
        if not len(inputs):
            continue
        outputs = forward_in(precision, model, inputs)
        sums[0] += per_sample_loss(outputs, targets).double().sum().cpu()
        sums[1] += correct(outputs, targets).double().sum().cpu()
        sums[2] += len(inputs)  # not all that were asked for: a file may be bad
    model.train()
    return sums

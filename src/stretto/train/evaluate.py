"""Evaluation, shared out among the ranks."""

import numpy as np
import torch
from torch import Tensor

from stretto.comm.small import add_up_
from stretto.model.loss import correct, per_sample_loss
from stretto.telemetry.events import EvalDone
from stretto.train.parts import Parts
from stretto.train.settled import settled
from stretto.train.statistics import reestimate
from stretto.train.step import forward

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
        if own:
            sums[1] = _tested(parts)
        with settled(parts):
            if parts.config.statistics == "reestimate":
                reestimate(parts, done)
            sums[0] = _tested(parts)
            apart = parts.strategy.apart()
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
    sums = torch.zeros(3, dtype=torch.float64)
    parts.model.eval()
    for start in range(0, len(mine), _BATCH):
        inputs, targets = parts.test_source.batch(mine[start : start + _BATCH])
        if not len(inputs):
            continue
        outputs = forward(parts, inputs)
        sums[0] += per_sample_loss(outputs, targets).double().sum()
        sums[1] += correct(outputs, targets).double().sum()
        sums[2] += len(inputs)  # not all that were asked for: a file may be bad
    parts.model.train()
    return sums

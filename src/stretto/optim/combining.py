"""Combine rules: what a worker's values become when those of others have arrived.

Like update rules (`stretto.optim.rules`) they are functions on tensors: a rank passes what it has,
virtual workers theirs stacked as [W, ...].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.optim.rules import Tensors


def pull(sent: Tensor, heard: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return by how much others pull: the sum of weight (heard - sent).

    What was heard is as old as what was sent in the same round, and values may have moved on since:
    only the difference of the two counts. So the mean over workers stays what it is, however late
    messages are; where nothing has moved, values plus this are own x + sum of weight y.
    """
    pulled = torch.zeros_like(sent)
    for theirs, weight in zip(heard, weights, strict=True):
        pulled += (theirs - sent) * weight
    return pulled


def take_in_(values: Tensors, mass: float, heard: Tensors, total: float) -> None:
    """Make ``values``, of which this worker has ``mass``, those of the ``total`` that it has now.

    Push-sum (Assran et al., 2019, arXiv:1811.10792): what was heard was multiplied by its mass
    where it left. Values are always divided by mass.
    """
    torch._foreach_mul_(values, mass / total)
    torch._foreach_add_(values, heard, alpha=1 / total)

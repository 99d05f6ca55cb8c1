"""Combine rules: what a worker's values become when those of others have arrived.

Like update rules (`stretto.optim.rules`) they are functions on tensors: a rank passes what it has,
virtual workers theirs stacked as [W, ...], and weights and masses as [W].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.optim.rules import Rate, Tensors, across, multiply_


def pull_(change: Tensor, sent: Tensor, heard: Sequence[Tensor], weights: Sequence[Rate]) -> None:
    """Add to ``change`` by how much others pull: the sum of weight (heard - sent).

    What was heard is as old as what was sent in the same round, and values may have moved on since:
    only the difference of the two counts. So the mean over workers stays what it is, however late
    messages are; where nothing has moved, values plus this are own x + sum of weight y.
    """
    for theirs, weight in zip(heard, weights, strict=True):
        change += (theirs - sent) * across(weight, sent)


def average_pair_(one: Tensor, other: Tensor) -> None:
    """Make both the mean of the two: each goes half way towards the other.

    AD-PSGD (Lian et al., 2018, arXiv:1710.06952). Either end can do its part alone, by what both
    said (`half_way`): what one goes up the other goes down, to the last bit.
    """
    gap = half_way(one, other)
    one += gap
    other -= gap


def half_way(said: Tensor, heard: Tensor) -> Tensor:
    """Return how far a worker goes towards another, from what both said in the same meeting."""
    return (heard - said) / 2


def take_in_(values: Tensors, mass: Rate, heard: Tensors, total: Rate) -> None:
    """Make ``values``, of which this worker has ``mass``, those of the ``total`` that it has now.

    Push-sum (Assran et al., 2019, arXiv:1811.10792): what was heard was multiplied by its mass
    where it left. Values are always divided by mass.
    """
    multiply_(values, [across(mass / total, value) for value in values])
    torch._foreach_add_(values, [more * across(1 / total, more) for more in heard])

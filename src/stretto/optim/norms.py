"""Norms of layers: the one thing in which an update of one layer may ask others.

LARS and LAMB call a `Norms` once a step, with weights and gradients (or updates) together, so that
whoever holds shards can add up all partial squares in one message, and whoever shares norms over a
group can average all of them in one.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Norms = Callable[[Sequence[Tensor]], Tensor]
"""From L layers, each stacked over W workers as [W, ...], to their norms [W, L], float32 or wider.
All ranks that share norms call it together, with as many layers; nobody waits for a device."""


class Sharing(NamedTuple):
    """Who shares norms, and from when on."""

    width: int
    """Ranks in a row that do."""
    from_step: int
    """The first step in which they do, counted from 0."""


def own_norms(layers: Sequence[Tensor]) -> Tensor:
    """Return the norms [W, L] of layers [W, ...] that are whole here.

    Sums are made in the layers' own type, 32 bits at least: on a CPU that costs 3e-5 of the norm at
    two million normal numbers, which a ratio does not feel, and 64 bits would take many times as
    long.
    """
    wide = [layer if layer.element_size() >= 4 else layer.float() for layer in layers]
    if len(wide[0]) == 1:
        return torch.stack(torch._foreach_norm(wide)).unsqueeze(0)
    rows = [layer.reshape(len(layer), layer[0].numel()) for layer in wide]
    return torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows], dim=1)

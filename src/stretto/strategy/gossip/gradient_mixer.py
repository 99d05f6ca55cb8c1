"""Gossip of gradients: a segment's are averaged with those of peers before its update."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stretto.strategy.gossip.mixer import Differences, Whom
from stretto.strategy.gossip.route import Route


class GradientMixer(Differences):
    """Moves gradients by what others had more, or less; parameters never travel.

    Behind the gradients is a mark for each parameter, whether this group had one of it: what nobody
    had stays away, and is not updated.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], wire: torch.dtype | None, whom: Whom, route: Route
    ) -> None:
        self._parameters = parameters
        self._MORE = len(parameters)
        super().__init__(parameters, wire, whom, route)

    def _told(self) -> list[Tensor]:
        grads = [parameter.grad for parameter in self._parameters]
        pairs = zip(self.values, grads, strict=True)
        present = [torch.zeros_like(value) if grad is None else grad for value, grad in pairs]
        return [*present, self._like.new_tensor([grad is not None for grad in grads])]

    def _take(self, change: Tensor) -> None:
        somebody_had = change[-self._MORE :] > 0
        changes = zip(self._parameters, self._views(change), somebody_had, strict=True)
        for parameter, moved, had in changes:
            if parameter.grad is not None:
                parameter.grad.add_(moved)
            elif had:
                parameter.grad = moved.clone()

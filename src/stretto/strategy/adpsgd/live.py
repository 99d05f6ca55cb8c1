"""The model of a rank as its peers know it, which may change at any moment.

Forward and backward need parameters that stay as they are; so the live model is another copy, of
which parameters are made anew before each step. An update is made on the live values by a gradient
of older ones.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stretto.optim.combining import half_way


class Live:
    """Flat values of all parameters, one tensor for each of their types; changed under `lock`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.lock = threading.Lock()
        self._groups: list[list[Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            self._groups.append([p.detach() for p in parameters if p.dtype == dtype])
        self._flats = self.rooms()
        self._views = [
            [part.view(p.shape) for part, p in zip(flat.split(sizes), group, strict=True)]
            for flat, group in zip(self._flats, self._groups, strict=True)
            for sizes in [[p.numel() for p in group]]
        ]

    def rooms(self) -> list[Tensor]:
        """Return tensors for as many values, in which they travel."""
        return [
            torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype)
            for group in self._groups
        ]

    @torch.no_grad()
    def give(self) -> None:
        """Make the parameters what the live model is; by whoever holds the lock."""
        for group, views in zip(self._groups, self._views, strict=True):
            torch._foreach_copy_(group, views)

    @torch.no_grad()
    def take(self) -> None:
        """Make the live model what the parameters are; by whoever holds the lock."""
        for group, views in zip(self._groups, self._views, strict=True):
            torch._foreach_copy_(views, group)

    @torch.no_grad()
    def say(self, said: Sequence[Tensor]) -> None:
        """Write down what it is now."""
        with self.lock:
            torch._foreach_copy_(list(said), self._flats)

    @torch.no_grad()
    def meet(self, said: Sequence[Tensor], heard: Sequence[Tensor]) -> None:
        """Go half way to what a peer has said, from what was said to it; see `half_way`.

        The values may have moved on since they were said: so does the mean with them.
        """
        with self.lock:
            for flat, mine, theirs in zip(self._flats, said, heard, strict=True):
                flat += half_way(mine, theirs)

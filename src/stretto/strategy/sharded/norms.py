"""Norms of layers whose pieces lie on several ranks: partial squares, one small sum."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


class ShardNorms:
    """The `stretto.optim.norms.Norms` of pieces; between `expect` and `over`, on all ranks."""

    def __init__(
        self,
        layers: Mapping[Tensor, int],
        counted: Sequence[bool],
        add_up: Callable[[Tensor], None],
    ) -> None:
        """Take the layer of each piece here, and whether this rank's part of a layer counts."""
        self._layers = layers
        self._counted = torch.tensor(counted, dtype=torch.float64)
        self._add_up = add_up
        self._expected: list[int] = []
        self._asked = True

    def expect(self, optimizer: Optimizer) -> None:
        """Note whose norms the coming step of ``optimizer`` will ask for, in its own order."""
        self._expected = [
            self._layers[piece]
            for group in optimizer.param_groups
            if group.get("adapt", True)
            for piece in group["params"]
            if piece.grad is not None
        ]
        self._asked = False

    def over(self, like: Tensor) -> None:
        """Take part in the sum, where this rank had nothing to ask for."""
        if not self._asked:
            self([], like)

    def __call__(self, tensors: Sequence[Tensor], like: Tensor | None = None) -> Tensor:
        """Return the norm [1, L] of the layer that each of ``tensors`` is a piece of."""
        self._asked = True
        layers = self._expected
        # Weights, and gradients or updates: two of each, also where there are none.
        device = tensors[0].device if tensors else like.device if like is not None else None
        squares = torch.zeros(2, len(self._counted), dtype=torch.float64, device=device)
        places = torch.tensor(layers, dtype=torch.long, device=device)
        if tensors:
            norms = torch.stack(torch._foreach_norm([t.reshape(-1) for t in tensors]))
            squares.index_add_(1, places, norms.double().square().view(2, -1))
            squares *= self._counted.to(squares.device)
        self._add_up(squares)
        return squares.sqrt()[:, places].reshape(1, -1).to(_type_of(tensors))


def _type_of(tensors: Sequence[Tensor]) -> torch.dtype:
    wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32

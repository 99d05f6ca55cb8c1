"""Weights for a user's own loop, whose loss is a mean over a local batch of any size."""

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from stretto.comm.channel import Channel, Pending
from stretto.errors import StrettoError


class SampleWeights:
    """Each rank weighs n_i / sum n: counts are seen in forward and summed beside backward.

    What travels is n_i over the *last* step's total, which all ranks know, so that the weights
    are near 1/n and a narrow wire does not overflow.
    """

    def __init__(self, model: nn.Module) -> None:
        self._latest = 0
        self._seen = 0
        self._scale: float | None = None
        self._count = torch.zeros(1, dtype=torch.float64)
        self._sum: Pending | None = None
        mine = weakref.ref(model)

        # A function, not a method: a copy of the model must not drag all of this along.
        def look(module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
            if module is mine() and torch.is_grad_enabled():
                self._latest = _batch_size([*inputs, *named.values()])

        model.register_forward_pre_hook(look, with_kwargs=True)

    def begin(self) -> None:
        """Count the samples of the backward that now begins: those of the latest forward."""
        if not self._latest:
            raise StrettoError(
                "gradients arrive, but the model was not called with a batch: call it as "
                "model(inputs), with tensors whose first dimension counts samples"
            )
        self._seen += self._latest

    def start(self, channel: Channel) -> None:
        """Sum the counts of this step; the buckets follow."""
        self._count.fill_(self._seen)
        self._sum = channel.start_all_reduce(self._count)
        if self._scale is None:  # once: nobody knows a total yet
            self._sum.wait()
            self._scale = max(1.0, float(self._count))

    def mine(self) -> float:
        """Return the samples of this rank over those of the last step."""
        return self._seen / (self._scale or 1.0)

    def total(self) -> float:
        """Return the samples of all ranks over those of the last step."""
        if self._sum is None:  # the model has nothing to train
            return 1.0
        self._sum.wait()
        return max(1.0, float(self._count)) / (self._scale or 1.0)

    def reset(self) -> None:
        """Forget this step's samples, once every bucket has been packed with them."""
        self._seen = 0
        self._scale = max(1.0, float(self._count)) if self._sum else None


def _batch_size(values: Iterable[object]) -> int:
    """Return the first dimension of the first tensor, also inside lists and dictionaries."""
    for value in values:
        size = 0
        if isinstance(value, Tensor):
            size = value.shape[0] if value.ndim else 0
        elif isinstance(value, Mapping):
            size = _batch_size(value.values())
        elif isinstance(value, list | tuple):
            size = _batch_size(value)
        if size:
            return size
    return 0

"""Norms of a group's mean layers, for ranks that have models of their own.

Crossover-SGD's code can let ranks in a row share the ratios of LARS (``sync_lars``): their norms
are those of weights and gradients summed over the group. Here they are of the mean, which is the
same ratio, with an eps that counts as it does for one rank.

What is needed are sums of tensors, not of norms, so all weights and gradients that have ratios
travel: one all-reduce inside the group for each step of the optimizer, on lane 0, in the thread
that steps. Nothing hides it.
"""

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.comm.algorithms.in_groups import ring_in_groups
from stretto.comm.channel import Channel
from stretto.comm.courier import Courier
from stretto.errors import ConfigError
from stretto.optim.norms import Sharing, own_norms
from stretto.strategy.base import MakeOptimizer
from stretto.strategy.own import OwnModels
from stretto.topology.grouped import possible_groups


def check_sharing(sharing: Sharing, size: int) -> None:
    """Refuse groups that ``size`` ranks cannot be.

    Raises:
        ConfigError: With the sizes that they can.
    """
    if size % sharing.width:
        # As many ranks in each as there may be groups: either divides them.
        raise ConfigError(
            f"optim.norm_group = {sharing.width}: {size} ranks can be groups of equal size of "
            f"{possible_groups(size)}"
        )


class GroupNorms:
    """The `stretto.optim.norms.Norms` of a group's mean, from a step on; before it, one's own.

    All ranks step the same parameters together, and some have no gradient of some of them: these
    lend their weights to the sum, and zeros, and need no ratio.
    """

    def __init__(self, owner: OwnModels, channel: Channel, sharing: Sharing) -> None:
        self._owner = owner
        owner.alone = False  # a rank that left a step out would be waited for
        self._sharing = sharing
        self._schedule = ring_in_groups(channel.size, sharing.width)
        self._courier = Courier(channel)
        self._layers: list[Tensor] = []
        """Parameters that are stepped now and have ratios; none, where norms are one's own."""
        self._asked = False

    def watching(self, make: MakeOptimizer) -> MakeOptimizer:
        """Return ``make`` for an optimizer that has these norms, and whose steps are watched."""

        def build(parameters: Iterable[nn.Parameter]) -> Optimizer:
            optimizer = make(parameters)
            optimizer.register_step_pre_hook(lambda *_: self._expect(optimizer))
            optimizer.register_step_post_hook(lambda *_: self._over())
            return optimizer

        return build

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the norms [1, 2L] of the group's mean of weights and gradients, [1, ...] each."""
        if not self._layers:
            return own_norms(tensors)
        self._asked = True
        had = [index for index, layer in enumerate(self._layers) if layer.grad is not None]
        weights, gradients = self._lent()
        for index, weight, gradient in zip(
            had, tensors[: len(had)], tensors[len(had) :], strict=True
        ):
            weights[index], gradients[index] = weight, gradient
        norms = torch._foreach_norm(self._means([*weights, *gradients]))
        asked = [*had, *(len(self._layers) + index for index in had)]
        return torch.stack([norms[index] for index in asked]).unsqueeze(0)

    def _lent(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return what the group is lent of layers of which this rank has no gradient."""
        weights = [layer.detach() for layer in self._layers]
        return weights, [torch.zeros_like(weight) for weight in weights]

    def _means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over the group of each tensor, flat."""
        wide = any(tensor.dtype is torch.float64 for tensor in tensors)
        kept = torch.float64 if wide else torch.float32
        flat = torch.cat([tensor.reshape(-1).to(kept) for tensor in tensors])
        began_s = time.monotonic()
        self._courier.run(self._courier.prepare(self._schedule, flat))
        self._owner.waited(time.monotonic() - began_s)
        flat.div_(self._sharing.width)
        return list(flat.split([tensor.numel() for tensor in tensors]))

    def _expect(self, optimizer: Optimizer) -> None:
        """Note whose norms the coming step is about, as all ranks do."""
        step, parameters = self._owner.coming()
        stepped = {id(parameter) for parameter in parameters}
        self._layers = [
            parameter
            for group in optimizer.param_groups
            if step >= self._sharing.from_step and group.get("adapt", True)
            for parameter in group["params"]
            if id(parameter) in stepped
        ]
        self._asked = not self._layers

    def _over(self) -> None:
        """Take part in the sum, where this rank had nothing to ask for."""
        if not self._asked:
            weights, gradients = self._lent()
            self._means([*weights, *gradients])
        self._layers = []

"""Norms for the trust ratios of LARS and LAMB, shared by ranks whose models differ.

In the code of Crossover-SGD neighbouring ranks can share the trust ratios of LARS (``sync_lars``):
the norms are of weights and gradients summed over the group. Here the norms are of the mean. The
ratio is the same, and its eps has the same weight as on one rank.

A norm of a mean needs the mean tensors, so all weights and gradients that have ratios are sent: one
all-reduce inside the group per optimizer step, on lane 0, in the thread that steps. It does not
overlap with computation.
"""

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.collectives.algorithms.ring import ring_in_groups
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.transport import Transport
from stretto.errors import ConfigError
from stretto.optim.layer_optimizer import NormSharing, local_norms
from stretto.strategies.contract import MakeOptimizer
from stretto.strategies.local_state import LocalModelStrategy
from stretto.topology.round_peers import possible_group_counts


def check_norm_groups(norm_sharing: NormSharing, size: int) -> None:
    """Check that ``size`` ranks can form groups of the configured size.

    Raises:
        ConfigError: They cannot; the message names the sizes that are possible.
    """
    if size % norm_sharing.group_size:
        # Group sizes and group counts are both the divisors of `size`.
        raise ConfigError(
            f"optim.norm_group = {norm_sharing.group_size}: {size} ranks can be groups of equal "
            f"size of {possible_group_counts(size)}"
        )


class GroupTrustRatioNorms:
    """Norms of a group's mean, as a `stretto.optim.layer_optimizer.NormFunction`.

    Before ``norm_sharing.from_step`` the norms are those of this rank. All ranks of a group step
    the same parameters together. A rank without a gradient of a parameter adds its weight and a
    gradient of zero to the sums, and needs no ratio.
    """

    def __init__(
        self, strategy: LocalModelStrategy, transport: Transport, norm_sharing: NormSharing
    ) -> None:
        self._strategy = strategy
        strategy.ranks_step_independently = (
            False  # the group would wait for a rank that skips a step
        )
        self._sharing = norm_sharing
        self._schedule = ring_in_groups(transport.size, norm_sharing.group_size)
        self._executor = CollectiveExecutor(transport)
        self._stepped_layers: list[Tensor] = []
        """Parameters with ratios in the current step; empty while norms are not shared."""
        self._norms_requested = False

    def with_trust_ratio_norms(self, make_optimizer: MakeOptimizer) -> MakeOptimizer:
        """Return ``make_optimizer`` with step hooks; its optimizer must use these norms."""

        def build(parameters: Iterable[nn.Parameter]) -> Optimizer:
            optimizer = make_optimizer(parameters)
            optimizer.register_step_pre_hook(lambda *_: self._before_step(optimizer))
            optimizer.register_step_post_hook(lambda *_: self._after_step())
            return optimizer

        return build

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the norms [1, 2L] of the group's means: of L weights, then of L gradients."""
        if not self._stepped_layers:
            return local_norms(tensors)
        self._norms_requested = True
        with_gradient = [
            index for index, layer in enumerate(self._stepped_layers) if layer.grad is not None
        ]
        weights, gradients = self._zero_contribution()
        for index, weight, gradient in zip(
            with_gradient, tensors[: len(with_gradient)], tensors[len(with_gradient) :], strict=True
        ):
            weights[index], gradients[index] = weight, gradient
        norms = torch._foreach_norm(self._group_means([*weights, *gradients]))
        requested = [
            *with_gradient,
            *(len(self._stepped_layers) + index for index in with_gradient),
        ]
        return torch.stack([norms[index] for index in requested]).unsqueeze(0)

    def _zero_contribution(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return weights and zero gradients of all layers of the step."""
        weights = [layer.detach() for layer in self._stepped_layers]
        return weights, [torch.zeros_like(weight) for weight in weights]

    def _group_means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over the group of each tensor, flat."""
        needs_float64 = any(tensor.dtype is torch.float64 for tensor in tensors)
        sum_dtype = torch.float64 if needs_float64 else torch.float32
        flat = torch.cat([tensor.reshape(-1).to(sum_dtype) for tensor in tensors])
        started_s = time.monotonic()
        self._executor.run(self._executor.prepare(self._schedule, flat))
        self._strategy.add_waited(time.monotonic() - started_s)
        flat.div_(self._sharing.group_size)
        return list(flat.split([tensor.numel() for tensor in tensors]))

    def _before_step(self, optimizer: Optimizer) -> None:
        """Record the layers that the next step needs norms of; they are equal on all ranks."""
        step, parameters = self._strategy.next_update()
        stepped = {id(parameter) for parameter in parameters}
        self._stepped_layers = [
            parameter
            for group in optimizer.param_groups
            if step >= self._sharing.from_step and group.get("adapt", True)
            for parameter in group["params"]
            if id(parameter) in stepped
        ]
        self._norms_requested = not self._stepped_layers

    def _after_step(self) -> None:
        """Take part in the all-reduce if the optimizer needed no norm on this rank."""
        if not self._norms_requested:
            weights, gradients = self._zero_contribution()
            self._group_means([*weights, *gradients])
        self._stepped_layers = []

"""The optimizers: SGD, LARS, Adam, AdamW and LAMB, on top of `LayerOptimizer`."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from stretto.errors import ConfigError
from stretto.optim.layer_optimizer import (
    LayerGroup,
    LayerOptimizer,
    NormFunction,
    TrustRatioOptions,
    lamb_ratio,
    lars_ratio,
    local_norms,
    scale_layers_,
)
from stretto.optim.rules import (
    FloatOrTensor,
    Moments,
    Momentum,
    Tensors,
    adam_directions,
    add_scaled_,
    add_weight_decay,
    decoupled_decay_,
    momentum_step_,
    update_moments_,
)

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
"""Parameters, or parameter groups with their own options, as in any torch optimizer."""

NO_MOMENTUM = Momentum(0.0)


class SGD(LayerOptimizer):
    """Stochastic gradient descent with momentum in either order; the default order is torch's.

    Weight decay is added to the gradient. For a rate of 0 see `stretto.optim.rules.momentum_step_`.
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: FloatOrTensor,
        *,
        momentum: Momentum = NO_MOMENTUM,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, **asdict(momentum)})

    def update_(self, groups: Sequence[LayerGroup]) -> None:
        """Step each group on its own."""
        for group in groups:
            decay = group.options["weight_decay"]
            directions = group.gradients
            if decay:
                directions = add_weight_decay(group.gradients, group.weights, decay)
            apply_momentum_(group, directions)


def apply_momentum_(group: LayerGroup, directions: Tensors) -> None:
    """Step along ``directions`` with the momentum settings of the group's options."""
    options = group.options
    constants = Momentum(**{key: options[key] for key in Momentum.__slots__})
    lr: FloatOrTensor = options["lr"]
    if not constants.momentum:
        add_scaled_(group.weights, directions, -lr)
        return
    buffers = group.state_tensors("momentum_buffer")
    last_rates = [state.get("last_rate") for state in group.states]
    momentum_step_(group.weights, buffers, directions, lr, constants, last_rates)
    if constants.momentum_correction:
        # A number if possible: loading a checkpoint would move a tensor to the device, and every
        # step would read it back. A tensor is cloned, because a scheduler may overwrite it.
        last_rate = lr.clone() if isinstance(lr, Tensor) else float(lr)
        for state in group.states:
            state["last_rate"] = last_rate


LARS_MOMENTUM = Momentum(0.9, "inside")
LARS_TRUST_RATIO = TrustRatioOptions()


class LARS(LayerOptimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv:1708.03888).

    ::

        ratio = trust |w| / (|g| + decay |w| + eps)        1 if a norm is 0
        v = m v + lr ratio (g + decay w);  w = w - v       order "inside", as published

    A group with ``adapt=False`` (biases, normalisation layers) has a ratio of 1 and no decay;
    `stretto.optim.build.split_by_decay` makes the two groups. The peak rate belongs to the current
    schedule, so it is neither an option of a group nor part of the state.
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: FloatOrTensor,
        *,
        momentum: Momentum = LARS_MOMENTUM,
        trust: TrustRatioOptions = LARS_TRUST_RATIO,
        weight_decay: float = 0.0,
        norms: NormFunction = local_norms,
    ) -> None:
        self.norms = norms
        self.peak_lr = trust.peak_lr
        options = {"lr": lr, "weight_decay": weight_decay, "adapt": True}
        options |= {key: value for key, value in asdict(trust).items() if key != "peak_lr"}
        super().__init__(parameters, {**options, **asdict(momentum)})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "norms": self.norms, "peak_lr": self.peak_lr}

    def update_(self, groups: Sequence[LayerGroup]) -> None:
        """Compute all norms at once, then step each group."""
        adapted = [group for group in groups if group.options["adapt"]]
        weights = self.with_model_dim([weight for group in adapted for weight in group.weights])
        gradients = self.with_model_dim([grad for group in adapted for grad in group.gradients])
        if weights:
            all_norms = self.norms([*weights, *gradients])
            weight_norms, gradient_norms = all_norms.tensor_split(2, dim=1)
        offset = 0
        for group in groups:
            if not group.options["adapt"]:
                apply_momentum_(group, group.gradients)
                continue
            decay, columns = (
                group.options["weight_decay"],
                slice(offset, offset + len(group.weights)),
            )
            ratio = lars_ratio(
                weight_norms[:, columns],
                gradient_norms[:, columns],
                self._trust_ratio_options(group),
                decay,
            )
            directions = add_weight_decay(group.gradients, group.weights, decay)
            scale_layers_(self.with_model_dim(directions), ratio)
            apply_momentum_(group, directions)
            offset = columns.stop

    def _trust_ratio_options(self, group: LayerGroup) -> TrustRatioOptions:
        options = group.options
        return TrustRatioOptions(
            options["trust"], options["eps"], options["ratio_decay"], self.peak_lr
        )


ADAM_MOMENTS = Moments()


class Adam(LayerOptimizer):
    """Adam (arXiv:1412.6980); weight decay is added to the gradient, before the normalisation."""

    def __init__(
        self,
        parameters: Parameters,
        lr: FloatOrTensor,
        *,
        moments: Moments = ADAM_MOMENTS,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, **asdict(moments)})

    def update_(self, groups: Sequence[LayerGroup]) -> None:
        """Step each group on its own."""
        for group in groups:
            decay, gradients = group.options["weight_decay"], group.gradients
            if decay:
                gradients = add_weight_decay(gradients, group.weights, decay)
            add_scaled_(group.weights, adam_step_directions(group, gradients), -group.options["lr"])


class AdamW(Adam):
    """AdamW (arXiv:1711.05101): Adam with decoupled weight decay."""

    def update_(self, groups: Sequence[LayerGroup]) -> None:
        """Step each group on its own."""
        for group in groups:
            decay, lr = group.options["weight_decay"], group.options["lr"]
            if decay:
                decoupled_decay_(group.weights, lr, decay)
            add_scaled_(group.weights, adam_step_directions(group, group.gradients), -lr)


def adam_step_directions(group: LayerGroup, gradients: Tensors) -> list[Tensor]:
    """Update the moments of ``group`` with ``gradients``, and return Adam's directions."""
    constants = Moments(**{key: group.options[key] for key in Moments.__slots__})
    first_moments, second_moments = (
        group.state_tensors("exp_avg"),
        group.state_tensors("exp_avg_sq"),
    )
    update_moments_(first_moments, second_moments, gradients, constants)
    return adam_directions(first_moments, second_moments, group.count_step(), constants)


LAMB_MOMENTS = Moments(eps=1e-6)


class LAMB(LayerOptimizer):
    """Layer-wise adaptive moments (You et al. 2019, arXiv:1904.00962).

    ::

        r = Adam's direction + decay w
        w = w - lr ratio r,   ratio = |w| / |r|        1 if a norm is 0

    A group with ``adapt=False`` (biases, normalisation layers) has a ratio of 1 and no decay.
    ``norm_limit``, if set, is an upper limit of |w| in the ratio.
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: FloatOrTensor,
        *,
        moments: Moments = LAMB_MOMENTS,
        weight_decay: float = 0.0,
        norm_limit: float | None = None,
        norms: NormFunction = local_norms,
    ) -> None:
        if norm_limit is not None and norm_limit <= 0:
            raise ConfigError(f"norm_limit {norm_limit}: expected a number above 0")
        self.norms = norms
        options = {"lr": lr, "weight_decay": weight_decay, "norm_limit": norm_limit, "adapt": True}
        super().__init__(parameters, {**options, **asdict(moments)})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "norms": self.norms}

    def update_(self, groups: Sequence[LayerGroup]) -> None:
        """Compute all directions, then all norms at once, then step each group."""
        directions = [adam_step_directions(group, group.gradients) for group in groups]
        adapted = [
            (group, group_directions)
            for group, group_directions in zip(groups, directions, strict=True)
            if group.options["adapt"]
        ]
        for group, group_directions in adapted:
            torch._foreach_add_(
                group_directions, group.weights, alpha=group.options["weight_decay"]
            )
        weights = self.with_model_dim([weight for group, _ in adapted for weight in group.weights])
        updates = self.with_model_dim(
            [update for _, group_directions in adapted for update in group_directions]
        )
        if weights:
            all_norms = self.norms([*weights, *updates])
            weight_norms, update_norms = all_norms.tensor_split(2, dim=1)
        offset = 0
        for group, group_directions in adapted:
            columns = slice(offset, offset + len(group_directions))
            limit = group.options["norm_limit"]
            ratio = lamb_ratio(weight_norms[:, columns], update_norms[:, columns], limit)
            scale_layers_(self.with_model_dim(group_directions), ratio)
            offset = columns.stop
        for group, group_directions in zip(groups, directions, strict=True):
            add_scaled_(group.weights, group_directions, -group.options["lr"])

"""LAMB: Adam's direction, each layer going a step in proportion to its size (You et al. 2019)."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from stretto.errors import ConfigError
from stretto.optim.adam import directions_of
from stretto.optim.base import LayerOptimizer, Layers
from stretto.optim.norms import Norms, own_norms
from stretto.optim.ratios import lamb_ratio, scale_layers_
from stretto.optim.rules import Moments, Rate, add_scaled_
from stretto.optim.sgd import Parameters

PUBLISHED_MOMENTS = Moments(eps=1e-6)


class LAMB(LayerOptimizer):
    """Layer-wise adaptive moments (arXiv:1904.00962).

    ::

        r = Adam's direction + decay w
        w = w - lr ratio r,   ratio = |w| / |r|        1 where a norm is 0

    A group with ``adapt=False`` (biases, norms) has a ratio of 1 and no decay. ``norm_limit``,
    where set, is the most that |w| counts.
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: Rate,
        *,
        moments: Moments = PUBLISHED_MOMENTS,
        weight_decay: float = 0.0,
        norm_limit: float | None = None,
        norms: Norms = own_norms,
    ) -> None:
        if norm_limit is not None and norm_limit <= 0:
            raise ConfigError(f"norm_limit {norm_limit}: expected a number above 0")
        self.norms = norms
        options = {"lr": lr, "weight_decay": weight_decay, "norm_limit": norm_limit, "adapt": True}
        super().__init__(parameters, {**options, **asdict(moments)})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "norms": self.norms}

    def update_(self, groups: Sequence[Layers]) -> None:
        """Work out all directions, ask for all norms at once, then step each group."""
        directions = [directions_of(layers, layers.gradients) for layers in groups]
        adapted = [
            (layers, along)
            for layers, along in zip(groups, directions, strict=True)
            if layers.options["adapt"]
        ]
        for layers, along in adapted:
            torch._foreach_add_(along, layers.weights, alpha=layers.options["weight_decay"])
        weights = self.by_model([weight for layers, _ in adapted for weight in layers.weights])
        updates = self.by_model([update for _, along in adapted for update in along])
        if weights:
            both = self.norms([*weights, *updates])
            weight_norms, update_norms = both.tensor_split(2, dim=1)
        done = 0
        for layers, along in adapted:
            these = slice(done, done + len(along))
            limit = layers.options["norm_limit"]
            ratio = lamb_ratio(weight_norms[:, these], update_norms[:, these], limit)
            scale_layers_(self.by_model(along), ratio)
            done = these.stop
        for layers, along in zip(groups, directions, strict=True):
            add_scaled_(layers.weights, along, -layers.options["lr"])

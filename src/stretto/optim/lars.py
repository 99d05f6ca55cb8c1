"""LARS: SGD whose every layer goes a step in proportion to its size (You et al. 2017)."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stretto.optim.base import LayerOptimizer, Layers
from stretto.optim.norms import Norms, own_norms
from stretto.optim.ratios import Trust, lars_ratio, scale_layers_
from stretto.optim.rules import Momentum, Rate, decayed
from stretto.optim.sgd import Parameters, move_

PUBLISHED_MOMENTUM = Momentum(0.9, "inside")
PUBLISHED_TRUST = Trust()


class LARS(LayerOptimizer):
    """Layer-wise adaptive rates (arXiv:1708.03888).

    ::

        ratio = trust |w| / (|g| + decay |w| + eps)        1 where a norm is 0
        v = m v + lr ratio (g + decay w);  w = w - v       order "inside", as published

    A group with ``adapt=False`` (biases, norms) has a ratio of 1 and no decay;
    `stretto.optim.groups.split` makes the two groups. The peak rate is the present schedule's, so
    it is neither an option of a group nor part of the state.
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: Rate,
        *,
        momentum: Momentum = PUBLISHED_MOMENTUM,
        trust: Trust = PUBLISHED_TRUST,
        weight_decay: float = 0.0,
        norms: Norms = own_norms,
    ) -> None:
        self.norms = norms
        self.peak_lr = trust.peak_lr
        options = {"lr": lr, "weight_decay": weight_decay, "adapt": True}
        options |= {key: value for key, value in asdict(trust).items() if key != "peak_lr"}
        super().__init__(parameters, {**options, **asdict(momentum)})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "norms": self.norms, "peak_lr": self.peak_lr}

    def update_(self, groups: Sequence[Layers]) -> None:
        """Ask for all norms at once, then step each group."""
        adapted = [layers for layers in groups if layers.options["adapt"]]
        weights = self.by_model([weight for layers in adapted for weight in layers.weights])
        gradients = self.by_model([grad for layers in adapted for grad in layers.gradients])
        if weights:
            both = self.norms([*weights, *gradients])
            weight_norms, gradient_norms = both.tensor_split(2, dim=1)
        done = 0
        for layers in groups:
            if not layers.options["adapt"]:
                move_(layers, layers.gradients)
                continue
            decay, these = layers.options["weight_decay"], slice(done, done + len(layers.weights))
            ratio = lars_ratio(
                weight_norms[:, these], gradient_norms[:, these], self._trust(layers), decay
            )
            directions = decayed(layers.gradients, layers.weights, decay)
            scale_layers_(self.by_model(directions), ratio)
            move_(layers, directions)
            done = these.stop

    def _trust(self, layers: Layers) -> Trust:
        options = layers.options
        return Trust(options["trust"], options["eps"], options["ratio_decay"], self.peak_lr)

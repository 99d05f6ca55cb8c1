"""Adam and AdamW: the same direction, decay inside the gradient or apart from it."""

from collections.abc import Sequence
from dataclasses import asdict

from torch import Tensor

from stretto.optim.base import LayerOptimizer, Layers
from stretto.optim.rules import (
    Moments,
    Rate,
    Tensors,
    adam_directions,
    add_scaled_,
    decayed,
    remember_,
    shrink_,
)
from stretto.optim.sgd import Parameters

PUBLISHED_MOMENTS = Moments()


class Adam(LayerOptimizer):
    """Adam (arXiv:1412.6980); decay is added to the gradient, and so divided by its size."""

    def __init__(
        self,
        parameters: Parameters,
        lr: Rate,
        *,
        moments: Moments = PUBLISHED_MOMENTS,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, **asdict(moments)})

    def update_(self, groups: Sequence[Layers]) -> None:
        """Step each group by itself."""
        for layers in groups:
            decay, gradients = layers.options["weight_decay"], layers.gradients
            if decay:
                gradients = decayed(gradients, layers.weights, decay)
            add_scaled_(layers.weights, directions_of(layers, gradients), -layers.options["lr"])


class AdamW(Adam):
    """AdamW (arXiv:1711.05101); decay shrinks weights apart from the gradient."""

    def update_(self, groups: Sequence[Layers]) -> None:
        """Step each group by itself."""
        for layers in groups:
            decay, lr = layers.options["weight_decay"], layers.options["lr"]
            if decay:
                shrink_(layers.weights, lr, decay)
            add_scaled_(layers.weights, directions_of(layers, layers.gradients), -lr)


def directions_of(layers: Layers, gradients: Tensors) -> list[Tensor]:
    """Return Adam's directions after one more step of ``layers``."""
    how = Moments(**{key: layers.options[key] for key in Moments.__slots__})
    firsts, seconds = layers.memory("exp_avg"), layers.memory("exp_avg_sq")
    remember_(firsts, seconds, gradients, how)
    return adam_directions(firsts, seconds, layers.count_step(), how)

"""Stochastic gradient descent, with momentum in either order."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from stretto.optim.base import LayerOptimizer, Layers
from stretto.optim.rules import Momentum, Rate, Tensors, add_scaled_, decayed, momentum_step_

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
"""Parameters, or groups of them with options of their own, as any torch optimizer takes them."""

PLAIN = Momentum(0.0)


class SGD(LayerOptimizer):
    """SGD; by default torch's own: the rate outside the buffer.

    Decay is added to the gradient. `stretto.optim.rules.momentum_step_` says what a rate of 0 does.
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: Rate,
        *,
        momentum: Momentum = PLAIN,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, **asdict(momentum)})

    def update_(self, groups: Sequence[Layers]) -> None:
        """Step each group by itself."""
        for layers in groups:
            decay = layers.options["weight_decay"]
            directions = layers.gradients
            if decay:
                directions = decayed(layers.gradients, layers.weights, decay)
            move_(layers, directions)


def move_(layers: Layers, directions: Tensors) -> None:
    """Step along ``directions`` with the momentum that the group's options ask for."""
    options = layers.options
    how = Momentum(**{key: options[key] for key in Momentum.__slots__})
    lr: Rate = options["lr"]
    if not how.momentum:
        add_scaled_(layers.weights, directions, -lr)
        return
    buffers = layers.memory("momentum_buffer")
    last_rates = [state.get("last_rate") for state in layers.states]
    momentum_step_(layers.weights, buffers, directions, lr, how, last_rates)
    if how.momentum_correction:
        # A number, unless rates are tensors, which a scheduler overwrites: a tensor would be
        # moved to the device by a checkpoint, and read back from there at every step.
        kept = lr.clone() if isinstance(lr, Tensor) else float(lr)
        for state in layers.states:
            state["last_rate"] = kept

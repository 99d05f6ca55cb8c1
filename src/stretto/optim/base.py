"""What our optimizers share: layers that have gradients, fp32 masters, memory kept exactly.

State is kept per parameter, step counts and last rates included, so that `step` may be called
several times in one training step, each time with other parameters' gradients.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.errors import ConfigError, StrettoError


@dataclass(frozen=True, slots=True)
class Layers:
    """The parameters of one group that have gradients, in the type their update is made in."""

    options: dict[str, Any]
    parameters: list[Tensor]
    weights: list[Tensor]
    """The parameters themselves, or the fp32 masters of those with 16 bits."""
    gradients: list[Tensor]
    states: list[dict[str, Any]]

    def memory(self, key: str) -> list[Tensor]:
        """Return each layer's tensor under ``key``; zeros at first."""
        for state, weight in zip(self.states, self.weights, strict=True):
            if key not in state:
                state[key] = torch.zeros_like(weight)
        return [state[key] for state in self.states]

    def count_step(self) -> list[float]:
        """Count one more step of each layer; return the counts."""
        for state in self.states:
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        steps = [state["step"] for state in self.states]
        torch._foreach_add_(steps, 1)
        counts: list[float] = torch.stack(steps).tolist()
        return counts

    def write_back_(self) -> None:
        """Round masters into their parameters."""
        pairs = list(zip(self.parameters, self.weights, strict=True))
        rounded = [(p, master) for p, master in pairs if master is not p]
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [master for _, master in rounded])


class LayerOptimizer(torch.optim.Optimizer):
    """An optimizer whose subclass says only how `Layers` move."""

    stacked = False
    """Whether every parameter is [W, ...], a row for each of W models; else it is one model's."""

    def __init__(self, parameters: Any, options: dict[str, Any]) -> None:  # noqa: ANN401 - as torch
        lr = options["lr"]
        if not isinstance(lr, Tensor) and not 0 <= lr < float("inf"):
            raise ConfigError(f"lr {lr}: expected a number, at least 0")
        if not options["weight_decay"] >= 0:
            raise ConfigError(f"weight_decay {options['weight_decay']}: expected at least 0")
        super().__init__(parameters, options)

    @abstractmethod
    def update_(self, groups: Sequence[Layers]) -> None:
        """Move the weights of every group; called with groups that are not empty, if any."""

    def by_model(self, layers: Sequence[Tensor]) -> list[Tensor]:
        """Return layers as [W, ...]; they share their memory."""
        return list(layers) if self.stacked else [layer[None] for layer in layers]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch
        """Update the parameters that have gradients; others, and gradients, stay as they are.

        Raises:
            StrettoError: A gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [_layers_of(group, self.state) for group in self.param_groups]
        groups = [group for group in groups if group.parameters]
        if groups:
            self.update_(groups)
        for group in groups:
            group.write_back_()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state back with the bits it had; torch alone would round masters to 16 bits."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, mine, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dtype != self.state[parameter][key].dtype:
                    self.state[parameter][key] = value.to(parameter.device, copy=True)


def _layers_of(group: dict[str, Any], state: Any) -> Layers:  # noqa: ANN401 - torch's own mapping
    parameters = [p for p in group["params"] if p.grad is not None]
    states = [state[p] for p in parameters]
    weights = _weights_of(parameters, states)
    gradients = [_fitting(p.grad, w) for p, w in zip(parameters, weights, strict=True)]
    return Layers(group, parameters, weights, gradients, states)


def _weights_of(parameters: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Return what the update is made on; a master also takes what others did to its parameter.

    Whoever loads or averages parameters between two steps knows nothing of masters. Where nobody
    touched it, a parameter is its rounded master, and the difference added is exactly 0.
    """
    weights = list(parameters)
    for index, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
        if parameter.element_size() > 2 or not parameter.is_floating_point():
            continue
        if "master" in state:
            rounded = state["master"].to(parameter.dtype)
            state["master"] += parameter.float() - rounded.float()
        else:
            state["master"] = parameter.float()
        weights[index] = state["master"]
    return weights


def _fitting(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return ``gradient`` in the type of ``weight``, or say why it cannot be used."""
    shape = list(weight.shape)
    if gradient.is_complex():
        raise StrettoError(
            f"the gradient of a parameter of shape {shape} is complex, for which there is no "
            "update rule here: keep its real and imaginary parts in a real one (torch.view_as_real)"
        )
    if gradient.layout != torch.strided:
        raise StrettoError(
            f"the gradient of a parameter of shape {shape} is sparse, for which there is no "
            "update rule here: build its layer with sparse=False"
        )
    return gradient.to(weight.dtype)

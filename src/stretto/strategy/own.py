"""What is a rank's own: its model while all look at the mean, and what its optimizer remembers."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.comm.channel import Channel
from stretto.comm.small import add_up_


class Own:
    """This rank's parameters, laid aside while the model is the mean of all ranks'."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._aside: list[Tensor] | None = None
        self._versions: list[int] = []

    def now(self) -> list[Tensor]:
        """Return copies of what this rank goes on with."""
        if self._aside is not None and self._untouched():
            return [tensor.clone() for tensor in self._aside]
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def lay_aside(self, means: Sequence[Tensor]) -> None:
        """Let the model be ``means`` until `take_back`."""
        self._aside = self.now()
        self.put_(means)
        self._versions = [parameter._version for parameter in self._parameters]

    def apart(self, channel: Channel) -> float:
        """Return by how much ranks differ from their mean, as a share of its norm.

        The root of the mean square; all ranks together, while their own are laid aside.
        """
        own, means = self._aside or [], [parameter.detach() for parameter in self._parameters]
        far = sum(
            float((a.double() - b.double()).square().sum()) for a, b in zip(own, means, strict=True)
        )
        squares = torch.tensor([far], dtype=torch.float64)
        add_up_(squares, channel)
        norm = math.fsum(float(mean.double().square().sum()) for mean in means)
        return math.sqrt(float(squares) / channel.size / norm) if norm else 0.0

    def take_back(self) -> None:
        """Go on with what was laid aside, unless somebody has loaded other weights since."""
        if self._aside is not None and self._untouched():
            self.put_(self._aside)
        self._aside = None

    @torch.no_grad()
    def put_(self, values: Sequence[Tensor]) -> None:
        """Overwrite the parameters."""
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    def _untouched(self) -> bool:
        return [parameter._version for parameter in self._parameters] == self._versions


def optimizer_tensors(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return copies of the tensors that an optimizer remembers, by parameter and what they are."""
    return {
        f"{names[id(parameter)]}/{key}": value.detach().clone()
        for parameter, remembered in optimizer.state.items()
        for key, value in remembered.items()
        if isinstance(value, Tensor)
    }


def put_optimizer_tensors_(
    optimizer: Optimizer, names: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> None:
    """Make an optimizer remember these, which `optimizer_tensors` returned, and no others."""
    for parameter, remembered in optimizer.state.items():
        for key in [key for key, value in remembered.items() if isinstance(value, Tensor)]:
            if f"{names[id(parameter)]}/{key}" not in tensors:
                del remembered[key]
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    for place, tensor in tensors.items():
        name, _, key = place.rpartition("/")
        optimizer.state[parameters[name]][key] = tensor.clone()

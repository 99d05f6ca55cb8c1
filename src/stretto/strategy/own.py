"""What is a rank's own: its model while all look at the mean, and what its optimizer remembers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.comm.channel import Channel
from stretto.comm.small import add_up_
from stretto.strategy.alike import had, made_alike


class Coming(NamedTuple):
    """What the optimizer's coming step is for, on all ranks alike."""

    step: int
    parameters: Sequence[nn.Parameter]
    """Those whose gradients have come; some ranks may have none of some."""


class Own:
    """This rank's parameters, laid aside while the model is the mean of all ranks'."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._aside: list[Tensor] | None = None
        self._versions: list[int] = []

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The model's, whoever they are of just now."""
        return self._parameters

    def now(self) -> list[Tensor]:
        """Return copies of what this rank goes on with."""
        if self._aside is not None and self._untouched():
            return [tensor.clone() for tensor in self._aside]
        return [parameter.detach().clone() for parameter in self._parameters]

    def named(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return the same by name."""
        mine = (names[id(parameter)] for parameter in self._parameters)
        return dict(zip(mine, self.now(), strict=True))

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
    """Make an optimizer remember these, which `optimizer_tensors` returned, and no others.

    They come from a checkpoint, and lie with the host until they are remembered.
    """
    for parameter, remembered in optimizer.state.items():
        for key in [key for key, value in remembered.items() if isinstance(value, Tensor)]:
            if f"{names[id(parameter)]}/{key}" not in tensors:
                del remembered[key]
    owners = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    for place, tensor in tensors.items():
        name, _, key = place.rpartition("/")
        parameter, group = owners[name]
        # Step counts stay with the host, unless an optimizer counts on the device.
        moves = key != "step" or group.get("capturable") or group.get("fused")
        home = parameter.device if moves else tensor.device
        optimizer.state[parameter][key] = tensor.to(home, copy=True)


def own_means_(parameters: Sequence[nn.Parameter], factor: float) -> tuple[Tensor, ...]:
    """Make gradients those of this rank's own mean, and return them.

    A rank without samples has gradients of zero: its momentum goes on, as it does elsewhere.
    """
    if all(parameter.grad is None for parameter in parameters):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if factor != 1 and gradients:
        torch._foreach_mul_(gradients, factor)
    return tuple(gradients)


class OwnModels:
    """What strategies have in common whose ranks have models of their own."""

    own_models = True
    alone = True
    _channel: Channel
    _optimizer: Optimizer
    _own: Own
    _names: dict[int, str]
    """Of parameters, by their identity."""
    _step: int
    _waited_s: float
    _stepping: Sequence[nn.Parameter] | None = None
    """Parameters that are updated now, before others have their gradients; None: all of them."""

    def coming(self) -> Coming:
        """Return what the optimizer steps next."""
        stepping = self._own.parameters if self._stepping is None else self._stepping
        return Coming(self._step, stepping)

    def waited(self, seconds: float) -> None:
        """Count time for which an update stood still for messages."""
        self._waited_s += seconds

    def apart(self) -> float | None:
        """Return how far ranks' own models are from their mean; all ranks together, settled."""
        return self._own.apart(self._channel)

    def unsettle(self) -> None:
        """Go on with this rank's own model."""
        self._own.take_back()

    def whole_optimizer(self) -> Optimizer:
        """Return this rank's optimizer; rank 0's is what others begin with."""
        return self._optimizer

    def take_optimizer(self, whole: Optimizer) -> None:
        """Do nothing: it is the optimizer."""

    def undoable(self) -> dict[str, Tensor]:
        """Return nothing: of a step that is left out nothing has left."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: rounds follow from the step."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Accept the empty state."""

    def _kept(self) -> dict[str, Tensor]:
        """Return copies of this rank's model and what its optimizer remembers; all together."""
        remembered = made_alike(optimizer_tensors(self._optimizer, self._names), self._channel)
        own = self._own.named(self._names)
        return laid_out({"parameters": own, "optimizer": remembered})

    def _take_kept(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what `_kept` returned, which is somewhere in ``state``."""
        own = under(state, "parameters")
        self._own.take_back()
        self._own.put_([own[name] for name in self._own.named(self._names)])
        put_optimizer_tensors_(self._optimizer, self._names, had(under(state, "optimizer")))


def laid_out(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all parts by names that begin with the part's."""
    return {f"{part}/{name}": t for part, kept in parts.items() for name, t in kept.items()}


def under(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the tensors of one part, as `laid_out` was given them."""
    before = f"{part}/"
    return {n.removeprefix(before): t for n, t in state.items() if n.startswith(before)}

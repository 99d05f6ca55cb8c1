"""Per-rank state of strategies whose replicas differ: parameters, optimizer state and buffers."""

import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.comm.broadcast import all_reduce_mean_, broadcast_
from stretto.comm.transport import Transport, all_gather_text, all_reduce_small_

_PRESENT_KEY = "had"
"""Checkpoint key of the mask that tells which tensors are not padding."""


def pad_missing_tensors(tensors: Mapping[str, Tensor], transport: Transport) -> dict[str, Tensor]:
    """Return ``tensors`` with zeros added for names that only other ranks have (collective).

    A checkpoint needs the same names on all ranks, but optimizer state exists only for parameters
    that have had a gradient on a rank. The result includes a mask that `drop_padding` reads.
    """
    local_descriptions = {name: _describe_tensor(tensor) for name, tensor in tensors.items()}
    descriptions_of_ranks = [
        json.loads(text) for text in all_gather_text(json.dumps(local_descriptions), transport)
    ]
    descriptions = {
        name: description
        for descriptions_of_rank in descriptions_of_ranks
        for name, description in descriptions_of_rank.items()
    }
    padded = {
        name: tensors[name] if name in tensors else _zeros_like_description(*descriptions[name])
        for name in sorted(descriptions)
    }
    return padded | {
        _PRESENT_KEY: torch.tensor([name in tensors for name in padded], dtype=torch.bool)
    }


def drop_padding(padded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that were not padding when `pad_missing_tensors` returned ``padded``."""
    names = sorted(name for name in padded if name != _PRESENT_KEY)
    is_present = padded[_PRESENT_KEY].tolist() if _PRESENT_KEY in padded else [False] * len(names)
    return {name: padded[name] for name, present in zip(names, is_present, strict=True) if present}


def _describe_tensor(tensor: Tensor) -> tuple[str, list[int], str]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type


def _zeros_like_description(dtype: str, shape: list[int], device: str) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


class ModelBuffers:
    """Buffers of a model, such as batch statistics and counts, which differ while ranks train."""

    def __init__(self, model: nn.Module) -> None:
        self._statistics = [b for b in model.buffers() if b.is_floating_point()]
        self._counters = [b for b in model.buffers() if not b.is_floating_point()]

    def consolidate(self, transport: Transport) -> None:
        """Make buffers equal (collective): floats become their mean, others those of rank 0."""
        all_reduce_mean_(self._statistics, transport)
        broadcast_(self._counters, transport)


class NextUpdate(NamedTuple):
    """The step and the parameters of the optimizer's next update; equal on all ranks."""

    step: int
    parameters: Sequence[nn.Parameter]
    """Parameters to update; a rank may lack gradients of some of them."""


class LocalParameters:
    """This rank's parameters, saved while the model holds the mean of all ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._saved: list[Tensor] | None = None
        self._versions: list[int] = []

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The model's parameters, whether they hold local values or the mean."""
        return self._parameters

    def snapshot(self) -> list[Tensor]:
        """Return copies of this rank's values: the saved ones while the model holds the mean."""
        if self._saved is not None and self._is_unmodified():
            return [tensor.clone() for tensor in self._saved]
        return [parameter.detach().clone() for parameter in self._parameters]

    def by_name(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return `snapshot` by parameter name; ``names`` maps ``id(parameter)`` to it."""
        parameter_names = (names[id(parameter)] for parameter in self._parameters)
        return dict(zip(parameter_names, self.snapshot(), strict=True))

    @torch.no_grad()
    def swap_in_mean(self, means: Sequence[Tensor]) -> None:
        """Save this rank's values and set the model to ``means`` until `restore`."""
        self._saved = self.snapshot()
        self.overwrite_(means)
        self._versions = [parameter._version for parameter in self._parameters]

    def consensus_distance(self, transport: Transport) -> float:
        """Return the root mean square distance of ranks from their mean, relative to its norm.

        Collective; the model must hold the mean.
        """
        local, means = self._saved or [], [parameter.detach() for parameter in self._parameters]
        squared_distance = sum(
            float((a.double() - b.double()).square().sum())
            for a, b in zip(local, means, strict=True)
        )
        squares = torch.tensor([squared_distance], dtype=torch.float64)
        all_reduce_small_(squares, transport)
        norm = math.fsum(float(mean.double().square().sum()) for mean in means)
        return math.sqrt(float(squares) / transport.size / norm) if norm else 0.0

    def restore(self) -> None:
        """Put the saved values back, unless the parameters were changed since `swap_in_mean`."""
        if self._saved is not None and self._is_unmodified():
            self.overwrite_(self._saved)
        self._saved = None

    @torch.no_grad()
    def overwrite_(self, values: Sequence[Tensor]) -> None:
        """Overwrite the parameters."""
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    def _is_unmodified(self) -> bool:
        return [parameter._version for parameter in self._parameters] == self._versions


def optimizer_tensors(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return copies of an optimizer's state tensors by "parameter name/state key"."""
    return {
        f"{names[id(parameter)]}/{key}": value.detach().clone()
        for parameter, optimizer_state in optimizer.state.items()
        for key, value in optimizer_state.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors_(
    optimizer: Optimizer, names: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> None:
    """Replace an optimizer's state tensors with ``tensors``, as `optimizer_tensors` returned them.

    The tensors come from a checkpoint, in host memory, and are copied to the parameter's device.
    """
    for parameter, optimizer_state in optimizer.state.items():
        for key in [key for key, value in optimizer_state.items() if isinstance(value, Tensor)]:
            if f"{names[id(parameter)]}/{key}" not in tensors:
                del optimizer_state[key]
    parameters_by_name = {
        names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]
    }
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        parameter, group = parameters_by_name[name]
        # Step counts stay in host memory, unless the optimizer counts on the device.
        follows_parameter = key != "step" or group.get("capturable") or group.get("fused")
        device = parameter.device if follows_parameter else tensor.device
        optimizer.state[parameter][key] = tensor.to(device, copy=True)


def scale_to_rank_mean_(parameters: Sequence[nn.Parameter], factor: float) -> tuple[Tensor, ...]:
    """Multiply gradients by ``factor``, which makes the loss a mean over this rank's samples.

    Returns the gradients. A rank without samples gets gradients of zero, so that its momentum
    decays as on other ranks.
    """
    if all(parameter.grad is None for parameter in parameters):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if factor != 1 and gradients:
        torch._foreach_mul_(gradients, factor)
    return tuple(gradients)


class LocalModelStrategy:
    """Common base of the strategies whose replicas differ: gossip, AD-PSGD and local updates."""

    replicas_differ = True
    ranks_step_independently = True
    _transport: Transport
    _optimizer: Optimizer
    _local_parameters: LocalParameters
    _names: dict[int, str]
    """Parameter names by ``id(parameter)``."""
    _step: int
    _waited_s: float
    _parameters_to_step: Sequence[nn.Parameter] | None = None
    """The parameters of a partial update, before others have gradients; None means all."""

    def next_update(self) -> NextUpdate:
        """Return the step and the parameters of the optimizer's next update."""
        parameters_to_step = (
            self._local_parameters.parameters
            if self._parameters_to_step is None
            else self._parameters_to_step
        )
        return NextUpdate(self._step, parameters_to_step)

    def add_waited(self, seconds: float) -> None:
        """Add seconds for which an update waited for messages."""
        self._waited_s += seconds

    def consensus_distance(self) -> float | None:
        """Return the distance of ranks from their mean, relative to its norm.

        Collective; call it after `consolidate`.
        """
        return self._local_parameters.consensus_distance(self._transport)

    def restore_local(self) -> None:
        """Put this rank's own parameters back."""
        self._local_parameters.restore()

    def full_optimizer_state(self) -> Optimizer:
        """Return this rank's optimizer; a checkpoint keeps that of rank 0."""
        return self._optimizer

    def load_full_optimizer_state(self, full_optimizer: Optimizer) -> None:
        """Do nothing: ``full_optimizer`` is this rank's optimizer."""

    def rollback_state(self) -> dict[str, Tensor]:
        """Return nothing: a skipped step has not changed the local state."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the rounds follow from the step number."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Accept the empty state."""

    def _replica_state(self) -> dict[str, Tensor]:
        """Return copies of this rank's parameters and optimizer state (collective)."""
        optimizer_state = pad_missing_tensors(
            optimizer_tensors(self._optimizer, self._names), self._transport
        )
        local = self._local_parameters.by_name(self._names)
        return flatten_state({"parameters": local, "optimizer": optimizer_state})

    def _load_replica_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the entries of ``state`` that `_replica_state` returned."""
        local = select_part(state, "parameters")
        self._local_parameters.restore()
        self._local_parameters.overwrite_(
            [local[name] for name in self._local_parameters.by_name(self._names)]
        )
        load_optimizer_tensors_(
            self._optimizer, self._names, drop_padding(select_part(state, "optimizer"))
        )


def pre_hook_of(module: nn.Module, action: Callable[[], None]) -> Callable[..., None]:
    """Return a forward pre-hook that calls ``action`` for ``module``, but not for its deep copies.

    A deep copy of a module has the same hooks, so the hook checks a weak reference.
    """
    module_ref = weakref.ref(module)

    def before_forward(called: nn.Module, _inputs: object) -> None:
        if called is module_ref():
            action()

    return before_forward


def flatten_state(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all parts by "part/name"."""
    return {f"{part}/{name}": t for part, kept in parts.items() for name, t in kept.items()}


def select_part(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return the tensors of one part by the names that `flatten_state` was given."""
    prefix = f"{part}/"
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}

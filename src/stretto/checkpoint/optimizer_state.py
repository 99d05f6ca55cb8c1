"""An optimizer's memory as named tensors and plain facts, and back, exactly.

The framework's own ``state_dict`` numbers parameters by position and, when it is loaded, casts
floating state to the parameter's type. Here state is keyed by the parameter's name, and every
value comes back with the type and the bits it had.

Tensors are named ``state/PARAMETER/KEY`` and ``groups/INDEX/KEY``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from stretto.checkpoint.manifest import plain
from stretto.errors import CheckpointError


class _Held(BaseModel):
    """What one parameter's state or one group's options consist of."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    values: dict[str, Any]
    tensors: list[str]


class _Group(_Held):
    parameters: list[str]


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    groups: list[_Group]
    state: dict[str, _Held]

    def tensor_names(self) -> set[str]:
        """Return the names of all tensors that belong to these facts."""
        owners = [(f"groups/{i}", group.tensors) for i, group in enumerate(self.groups)]
        owners += [(f"state/{name}", held.tensors) for name, held in self.state.items()]
        return {f"{owner}/{key}" for owner, keys in owners for key in keys}


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors and its JSON facts.

    Args:
        optimizer: Left as it is. The tensors returned are its own, not copies.
        named: Every parameter it holds by name, such as ``dict(model.named_parameters())``.
    """
    tensors: dict[str, Tensor] = {}
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for index, parameters in enumerate(_named_groups(optimizer, named)):
        options = {k: v for k, v in optimizer.param_groups[index].items() if k != "params"}
        held = _set_apart(options, f"groups/{index}", tensors)
        groups.append({"parameters": list(parameters), **held})
        for name, parameter in parameters.items():
            if parameter in optimizer.state:
                own = optimizer.state[parameter]
                state[name] = _set_apart(own, f"state/{name}", tensors)
    return tensors, {"groups": groups, "state": state}


@torch.no_grad()
def restore_optimizer_(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Give the optimizer back what `flatten_optimizer` returned; refused as a whole or done.

    The groups must hold the parameters they held then. An option the checkpoint does not know
    (a newer framework has more) keeps its present value. Tensors are copied.
    """
    groups = _named_groups(optimizer, named)
    kept = _checked(facts, groups, tensors)
    optimizer.state.clear()
    for index, (parameters, group_kept) in enumerate(zip(groups, kept.groups, strict=True)):
        group = optimizer.param_groups[index]
        _restore_options_(group, group_kept, index, tensors)
        for name, parameter in parameters.items():
            if name in kept.state:
                held = kept.state[name]
                optimizer.state[parameter] = dict(held.values) | {
                    key: _at_home(tensors[f"state/{name}/{key}"], key, group, parameter)
                    for key in held.tensors
                }


def _named_groups(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Return each group's parameters by name."""
    # The first of several names wins, as it does in `named_parameters` for tied weights.
    names = {id(parameter): name for name, parameter in reversed(list(named.items()))}
    groups: list[dict[str, Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        nameless = [p for p in group["params"] if id(p) not in names]
        if nameless:
            raise CheckpointError(
                f"group {index} of the optimizer holds a parameter of shape"
                f" {list(nameless[0].shape)} that has no name; pass every parameter by name"
            )
        groups.append({names[id(p)]: p for p in group["params"]})
    held = {id(p) for parameters in groups for p in parameters.values()}
    num_strays = sum(id(key) not in held for key in optimizer.state)
    if num_strays:
        raise CheckpointError(
            f"the optimizer keeps state for {num_strays} things that are in none of its groups;"
            " only state of its parameters can be saved or replaced"
        )
    return groups


def _set_apart(values: Mapping[str, Any], owner: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Move the tensors among ``values`` to ``tensors``; return the rest, and which they were."""
    rest: dict[str, Any] = {}
    keys: list[str] = []
    for key, value in values.items():
        if not isinstance(key, str) or "/" in key:
            raise CheckpointError(f"{owner} of the optimizer has the key {key!r}, not a plain word")
        if isinstance(value, Tensor):
            tensors[f"{owner}/{key}"] = value
            keys.append(key)
        else:
            rest[key] = plain(value, where=f"{owner}/{key} of the optimizer")
    return {"values": rest, "tensors": keys}


def _checked(
    facts: Mapping[str, Any], groups: list[dict[str, Tensor]], tensors: Mapping[str, Tensor]
) -> _Facts:
    """Return the facts, once it is sure that all of them can be followed."""
    try:
        kept = _Facts.model_validate(dict(facts))
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise CheckpointError(
            f"the optimizer's facts are not in the form they are written in, at {place!r}"
        ) from None
    if len(kept.groups) != len(groups):
        raise CheckpointError(
            f"the checkpoint has {len(kept.groups)} groups of parameters, the optimizer"
            f" {len(groups)}; build it with the groups it had"
        )
    for index, (present, group) in enumerate(zip(groups, kept.groups, strict=True)):
        _refuse_difference(f"parameters of optimizer group {index}", present, group.parameters)
        if "params" in (*group.values, *group.tensors):
            raise CheckpointError(
                f"optimizer group {index} in the checkpoint has a 'params' option"
            )
    everywhere = [name for present in groups for name in present]
    _refuse_difference("parameters with state", everywhere, [*everywhere, *kept.state])
    _refuse_difference("optimizer tensors", kept.tensor_names(), tensors)
    return kept


def _refuse_difference(what: str, wanted: Iterable[str], found: Iterable[str]) -> None:
    missing, unknown = sorted({*wanted} - {*found}), sorted({*found} - {*wanted})
    if missing or unknown:
        told = [
            f"{kind} {names[:5]}"
            for kind, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise CheckpointError(
            f"{what} in the checkpoint do not fit: {', '.join(told)}"
            f" ({len(missing)} missing, {len(unknown)} unknown); resume with the model that was"
            " saved"
        )


def _restore_options_(
    group: dict[str, Any], kept: _Group, index: int, tensors: Mapping[str, Tensor]
) -> None:
    for key, value in kept.values.items():
        # JSON has no tuples; Adam's betas are one.
        was_tuple = isinstance(value, list) and isinstance(group.get(key), tuple)
        group[key] = tuple(value) if was_tuple else value
    for key in kept.tensors:
        present = group.get(key)
        tensor = tensors[f"groups/{index}/{key}"]
        device = present.device if isinstance(present, Tensor) else tensor.device
        group[key] = tensor.to(device, copy=True)


def _at_home(tensor: Tensor, key: str, group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Copy state to its parameter's device, except step counts, which live with the host."""
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return tensor.to(parameter.device if on_device else "cpu", copy=True)

"""Optimizer state as named tensors and JSON facts, restored exactly.

PyTorch's ``state_dict`` numbers parameters by position and, when loaded, casts floating-point state
to the parameter's type. Here state is keyed by parameter name, and every value is restored with its
original type and bits.

Tensors are named ``state/PARAMETER/KEY`` and ``groups/INDEX/KEY``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from stretto.checkpoint.manifest import to_plain_json
from stretto.errors import CheckpointError


class _StoredValues(BaseModel):
    """The state of one parameter or the options of one group."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    values: dict[str, Any]
    tensors: list[str]


class _StoredGroup(_StoredValues):
    parameters: list[str]


class _StoredOptimizer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    groups: list[_StoredGroup]
    state: dict[str, _StoredValues]

    def tensor_names(self) -> set[str]:
        """Return the names of all tensors that these facts refer to."""
        owners = [(f"groups/{i}", group.tensors) for i, group in enumerate(self.groups)]
        owners += [(f"state/{name}", held.tensors) for name, held in self.state.items()]
        return {f"{owner}/{key}" for owner, keys in owners for key in keys}


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's tensors and its JSON facts.

    Args:
        optimizer: Not changed. The returned tensors are its own, not copies.
        named_parameters: Every parameter of the optimizer by name, such as
            ``dict(model.named_parameters())``.
    """
    tensors: dict[str, Tensor] = {}
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for index, parameters in enumerate(_named_groups(optimizer, named_parameters)):
        options = {k: v for k, v in optimizer.param_groups[index].items() if k != "params"}
        held = _separate_tensors(options, f"groups/{index}", tensors)
        groups.append({"parameters": list(parameters), **held})
        for name, parameter in parameters.items():
            if parameter in optimizer.state:
                parameter_state = optimizer.state[parameter]
                state[name] = _separate_tensors(parameter_state, f"state/{name}", tensors)
    return tensors, {"groups": groups, "state": state}


@torch.no_grad()
def restore_optimizer_(
    optimizer: torch.optim.Optimizer,
    named_parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Restore what `flatten_optimizer` returned; on an error the optimizer is unchanged.

    The groups must contain the same parameters as before. An option that the checkpoint lacks (for
    example one that a newer PyTorch added) keeps its present value. Tensors are copied.
    """
    groups = _named_groups(optimizer, named_parameters)
    stored = _validate_stored(facts, groups, tensors)
    optimizer.state.clear()
    for index, (parameters, stored_group) in enumerate(zip(groups, stored.groups, strict=True)):
        group = optimizer.param_groups[index]
        _restore_options_(group, stored_group, index, tensors)
        for name, parameter in parameters.items():
            if name in stored.state:
                held = stored.state[name]
                optimizer.state[parameter] = dict(held.values) | {
                    key: _copy_to_state_device(
                        tensors[f"state/{name}/{key}"], key, group, parameter
                    )
                    for key in held.tensors
                }


def _named_groups(
    optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Return each group's parameters by name."""
    # The first of several names wins, as it does in `named_parameters` for tied weights.
    names = {id(parameter): name for name, parameter in reversed(list(named_parameters.items()))}
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


def _separate_tensors(
    values: Mapping[str, Any], owner: str, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Move the tensors among ``values`` to ``tensors``; return the other values and their keys."""
    rest: dict[str, Any] = {}
    keys: list[str] = []
    for key, value in values.items():
        if not isinstance(key, str) or "/" in key:
            raise CheckpointError(f"{owner} of the optimizer has the key {key!r}, not a plain word")
        if isinstance(value, Tensor):
            tensors[f"{owner}/{key}"] = value
            keys.append(key)
        else:
            rest[key] = to_plain_json(value, where=f"{owner}/{key} of the optimizer")
    return {"values": rest, "tensors": keys}


def _validate_stored(
    facts: Mapping[str, Any], groups: list[dict[str, Tensor]], tensors: Mapping[str, Tensor]
) -> _StoredOptimizer:
    """Return the parsed facts after checking that all of them can be restored."""
    try:
        stored = _StoredOptimizer.model_validate(dict(facts))
    except ValidationError as error:
        location = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise CheckpointError(
            f"the optimizer's facts are not in the form they are written in, at {location!r}"
        ) from None
    if len(stored.groups) != len(groups):
        raise CheckpointError(
            f"the checkpoint has {len(stored.groups)} groups of parameters, the optimizer"
            f" {len(groups)}; build it with the groups it had"
        )
    for index, (current, group) in enumerate(zip(groups, stored.groups, strict=True)):
        _check_same_names(f"parameters of optimizer group {index}", current, group.parameters)
        if "params" in (*group.values, *group.tensors):
            raise CheckpointError(
                f"optimizer group {index} in the checkpoint has a 'params' option"
            )
    everywhere = [name for current in groups for name in current]
    _check_same_names("parameters with state", everywhere, [*everywhere, *stored.state])
    _check_same_names("optimizer tensors", stored.tensor_names(), tensors)
    return stored


def _check_same_names(what: str, expected: Iterable[str], found: Iterable[str]) -> None:
    missing, unknown = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    if missing or unknown:
        problems = [
            f"{kind} {names[:5]}"
            for kind, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise CheckpointError(
            f"{what} in the checkpoint do not fit: {', '.join(problems)}"
            f" ({len(missing)} missing, {len(unknown)} unknown); resume with the model that was"
            " saved"
        )


def _restore_options_(
    group: dict[str, Any], stored: _StoredGroup, index: int, tensors: Mapping[str, Tensor]
) -> None:
    for key, value in stored.values.items():
        # JSON has no tuples; Adam's betas are one.
        was_tuple = isinstance(value, list) and isinstance(group.get(key), tuple)
        group[key] = tuple(value) if was_tuple else value
    for key in stored.tensors:
        current = group.get(key)
        tensor = tensors[f"groups/{index}/{key}"]
        device = current.device if isinstance(current, Tensor) else tensor.device
        group[key] = tensor.to(device, copy=True)


def _copy_to_state_device(
    tensor: Tensor, key: str, group: Mapping[str, Any], parameter: Tensor
) -> Tensor:
    """Copy state to its parameter's device, except step counts, which stay on the CPU."""
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    return tensor.to(parameter.device if on_device else "cpu", copy=True)

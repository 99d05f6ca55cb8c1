"""Gather the sharded optimizer state into a full optimizer, and shard it again."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.collectives.algorithms import ALL_GATHER, host_all_gather
from stretto.comm.collective_executor import execute
from stretto.comm.transport import Transport, all_gather_text
from stretto.errors import CheckpointError
from stretto.strategies.sharded.sharded_unit import ParameterSlice, ShardedUnit
from stretto.strategies.sharded.updates import ShardUpdates

_SHARDED = "cut"
"""Marks, in a description, a tensor with one entry per element of its parameter."""

ParameterState = dict[str, Any]
"""The optimizer state of one parameter, by key."""


@torch.no_grad()
def gather_full_optimizer(updates: ShardUpdates, transport: Transport) -> Optimizer:
    """Return an optimizer of whole parameters with the gathered state (collective).

    Only rank 0 gets the state; on other ranks it is empty. One unit is gathered at a time.
    """
    full_optimizer = updates.new_full_optimizer()
    for sharded_unit in updates.sharded_units:
        descriptions_of_ranks = [
            json.loads(text)
            for text in all_gather_text(_describe_states(updates, sharded_unit), transport)
        ]
        for tensor, parameter in enumerate(sharded_unit.parameters):
            description = next(
                (one[str(tensor)] for one in descriptions_of_ranks if str(tensor) in one), None
            )
            if description is not None and transport.rank == 0:
                full_optimizer.state[parameter] = {
                    key: _parse_value(value) for key, value in description.items()
                }
        sharded_keys = {
            key
            for one in descriptions_of_ranks
            for description in one.values()
            for key in description
            if _is_sharded(description[key])
        }
        for key in sorted(sharded_keys):
            kind = next(k[key] for one in descriptions_of_ranks for k in one.values() if key in k)
            for index, value in _gather_state(updates, sharded_unit, key, kind, transport):
                if key in full_optimizer.state.get(sharded_unit.parameters[index], {}):
                    full_optimizer.state[sharded_unit.parameters[index]][key] = value
    return full_optimizer


@torch.no_grad()
def shard_optimizer(updates: ShardUpdates, full_optimizer: Optimizer) -> None:
    """Load this rank's slices of the state of ``full_optimizer``, and its group options."""
    local_optimizer = updates.optimizer
    for group, full_group in zip(
        local_optimizer.param_groups, full_optimizer.param_groups, strict=True
    ):
        group.update({key: value for key, value in full_group.items() if key != "params"})
    for sharded_unit in updates.sharded_units:
        for param_slice in sharded_unit.param_slices:
            parameter_state = full_optimizer.state.get(sharded_unit.parameters[param_slice.tensor])
            local_optimizer.state.pop(param_slice.parameter, None)
            if parameter_state:
                shape = sharded_unit.shapes[param_slice.tensor]
                local_optimizer.state[param_slice.parameter] = {
                    key: _slice(value, param_slice, key, shape)
                    for key, value in parameter_state.items()
                }


def _slice(value: object, param_slice: ParameterSlice, key: str, shape: torch.Size) -> object:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.clone()
    if value.numel() != shape.numel():
        raise CheckpointError(
            f"the optimizer's {key} of a parameter of shape {list(shape)} has shape "
            f"{list(value.shape)}: it cannot be cut up with the parameter"
        )
    length = param_slice.parameter.numel()
    return value.reshape(-1)[param_slice.start : param_slice.start + length].clone()


def _describe_states(updates: ShardUpdates, sharded_unit: ShardedUnit) -> str:
    """Return the state of this rank's slices of a unit as JSON, without sharded tensors."""
    description: dict[int, ParameterState] = {}
    for param_slice in sharded_unit.param_slices:
        parameter_state = updates.optimizer.state.get(param_slice.parameter)
        if parameter_state and param_slice.tensor not in description:
            description[param_slice.tensor] = {
                key: _describe_value(value) for key, value in parameter_state.items()
            }
    return json.dumps(description)


def _describe_value(value: object) -> list[object]:
    if not isinstance(value, Tensor):
        return ["plain", value]
    kind = str(value.dtype).removeprefix("torch.")
    return [_SHARDED, kind] if value.dim() else ["scalar", kind, value.item()]


def _is_sharded(encoded: list[Any]) -> bool:
    return bool(encoded[0] == _SHARDED)


def _parse_value(encoded: list[Any]) -> object:
    """Return the value that `_describe_value` encoded; None for a sharded tensor."""
    if encoded[0] == "scalar":
        return torch.tensor(encoded[2], dtype=getattr(torch, encoded[1]))
    return None if _is_sharded(encoded) else encoded[1]


def _gather_state(
    updates: ShardUpdates,
    sharded_unit: ShardedUnit,
    key: str,
    kind: list[Any],
    transport: Transport,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the index and the gathered state tensor ``key`` of each parameter of a unit."""
    layout = sharded_unit.layout
    flat = torch.zeros(
        layout.numel, dtype=getattr(torch, kind[1]), device=sharded_unit.master.device
    )
    for param_slice in sharded_unit.param_slices:
        parameter_state = updates.optimizer.state.get(param_slice.parameter) or {}
        if key in parameter_state:
            start = (
                layout.blocks[param_slice.block].chunk_start(param_slice.owner)
                + param_slice.chunk_offset
            )
            flat[start : start + param_slice.parameter.numel()] = parameter_state[key]
    if sharded_unit.sharding.shards_optimizer:
        for block in layout.blocks:
            part = flat[block.offset : block.offset + block.numel]
            all_gather = host_all_gather if sharded_unit.in_host else ALL_GATHER["ring"]
            execute(all_gather(transport.mesh, 1), part, transport)
    for index, (offset, shape) in enumerate(zip(layout.offsets, sharded_unit.shapes, strict=True)):
        yield index, flat[offset : offset + shape.numel()].view(shape).clone()

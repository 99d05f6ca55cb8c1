"""The optimizer as one rank would have it: pieces put together, and cut up again."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.comm.algorithms import ALL_GATHER, host_all_gather
from stretto.comm.channel import Channel
from stretto.comm.execute import execute
from stretto.comm.small import gather_text
from stretto.errors import CheckpointError
from stretto.strategy.sharded.storage import Piece, UnitStorage
from stretto.strategy.sharded.updates import Updates

_CUT = "cut"
"""Stands for a tensor that has an entry for each element of its parameter."""

Memory = dict[str, Any]
"""What an optimizer remembers of one parameter, by key."""


@torch.no_grad()
def put_together(updates: Updates, channel: Channel) -> Optimizer:
    """Return an optimizer of whole parameters with all that is remembered; all ranks together.

    Rank 0 has it all, a unit's memory at a time being gathered; others have nothing.
    """
    whole = updates.of_whole_parameters()
    for storage in updates.storages:
        told = [json.loads(text) for text in gather_text(_tell(updates, storage), channel)]
        for tensor, parameter in enumerate(storage.parameters):
            known = next((one[str(tensor)] for one in told if str(tensor) in one), None)
            if known is not None and channel.rank == 0:
                whole.state[parameter] = {key: _plain(value) for key, value in known.items()}
        cut = {
            key for one in told for known in one.values() for key in known if _is_cut(known[key])
        }
        for key in sorted(cut):
            kind = next(k[key] for one in told for k in one.values() if key in k)
            for index, value in _gathered(updates, storage, key, kind, channel):
                if key in whole.state.get(storage.parameters[index], {}):
                    whole.state[storage.parameters[index]][key] = value
    return whole


@torch.no_grad()
def cut_up_again(updates: Updates, whole: Optimizer) -> None:
    """Take the memory of ``whole``: every rank its own pieces."""
    mine = updates.optimizer
    for group, given in zip(mine.param_groups, whole.param_groups, strict=True):
        group.update({key: value for key, value in given.items() if key != "params"})
    for storage in updates.storages:
        for piece in storage.pieces:
            memory = whole.state.get(storage.parameters[piece.tensor])
            mine.state.pop(piece.parameter, None)
            if memory:
                shape = storage.shapes[piece.tensor]
                mine.state[piece.parameter] = {
                    key: _slice(value, piece, key, shape) for key, value in memory.items()
                }


def _slice(value: object, piece: Piece, key: str, shape: torch.Size) -> object:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        return value.clone()
    if value.numel() != shape.numel():
        raise CheckpointError(
            f"the optimizer's {key} of a parameter of shape {list(shape)} has shape "
            f"{list(value.shape)}: it cannot be cut up with the parameter"
        )
    length = piece.parameter.numel()
    return value.reshape(-1)[piece.start : piece.start + length].clone()


def _tell(updates: Updates, storage: UnitStorage) -> str:
    """Return, as text, what this rank's pieces of a unit remember, but for what is cut up."""
    known: dict[int, Memory] = {}
    for piece in storage.pieces:
        memory = updates.optimizer.state.get(piece.parameter)
        if memory and piece.tensor not in known:
            known[piece.tensor] = {key: _named(value) for key, value in memory.items()}
    return json.dumps(known)


def _named(value: object) -> list[object]:
    if not isinstance(value, Tensor):
        return ["plain", value]
    kind = str(value.dtype).removeprefix("torch.")
    return [_CUT, kind] if value.dim() else ["scalar", kind, value.item()]


def _is_cut(named: list[Any]) -> bool:
    return bool(named[0] == _CUT)


def _plain(named: list[Any]) -> object:
    """Return the value that `_named` told of; for what is cut up, nothing yet."""
    if named[0] == "scalar":
        return torch.tensor(named[2], dtype=getattr(torch, named[1]))
    return None if _is_cut(named) else named[1]


def _gathered(
    updates: Updates, storage: UnitStorage, key: str, kind: list[Any], channel: Channel
) -> Iterator[tuple[int, Tensor]]:
    """Yield, for each parameter of a unit, the whole of what its pieces remember under ``key``."""
    layout = storage.layout
    flat = torch.zeros(layout.numel, dtype=getattr(torch, kind[1]), device=storage.kept.device)
    for piece in storage.pieces:
        memory = updates.optimizer.state.get(piece.parameter) or {}
        if key in memory:
            start = layout.blocks[piece.block].chunk_start(piece.owner) + piece.place
            flat[start : start + piece.parameter.numel()] = memory[key]
    if storage.sharding.is_split:
        for block in layout.blocks:
            part = flat[block.offset : block.offset + block.numel]
            gather = host_all_gather if storage.in_host else ALL_GATHER["ring"]
            execute(gather(channel.mesh, 1), part, channel)
    for index, (offset, shape) in enumerate(zip(layout.offsets, storage.shapes, strict=True)):
        yield index, flat[offset : offset + shape.numel()].view(shape).clone()

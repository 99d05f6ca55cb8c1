"""The other peer: PyTorch's fully_shard (FSDP2), as its authors say it runs best."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

Groups = Sequence[Sequence[nn.Module]]
"""Modules that are gathered and reduced together, in the order of their use."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How parameters are kept."""

    reshard: bool
    """Whether they are let go after forward and gathered again (ZeRO-3), or kept (ZeRO-2)."""
    half_parameters: bool = False
    """Whether they are gathered and used as bf16."""
    half_gradients: bool = False
    """Whether gradients are reduced as bf16."""
    device: str = "cpu"


def group_up(modules: Sequence[nn.Module], least_bytes: int) -> list[list[nn.Module]]:
    """Join neighbours until each group has ``least_bytes`` of parameters."""
    groups: list[list[nn.Module]] = []
    for module in modules:
        if groups and _num_bytes(groups[-1]) < least_bytes:
            groups[-1].append(module)
        else:
            groups.append([module])
    if len(groups) > 1 and _num_bytes(groups[-1]) < least_bytes:
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups


def shard_fully(model: nn.Module, groups: Groups, settings: Settings) -> nn.Module:
    """Return ``model`` over the default group; what is in no group stays gathered with its root."""
    mesh = init_device_mesh(settings.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if settings.half_parameters else None,
        reduce_dtype=torch.bfloat16 if settings.half_gradients else None,
    )
    for group in groups:
        fully_shard(
            list(group),
            mesh=mesh,
            reshard_after_forward=settings.reshard,
            mp_policy=policy,
        )
    root = fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    _prefetch([root, *(_first(group) for group in groups)])
    # Without it a gather over Gloo is waited for where it begins. Reductions always are there.
    root._set_unshard_async_op(True)
    return model


def _prefetch(in_order: list[FSDPModule]) -> None:
    """Let each begin the gather of the next one, in forward and in backward."""
    for one, following in pairwise(in_order):
        one.set_modules_to_forward_prefetch([following])
    root, *groups = in_order
    for one, following in pairwise([root, *reversed(groups)]):
        one.set_modules_to_backward_prefetch([following])


def _first(group: Sequence[nn.Module]) -> FSDPModule:
    module = group[0]
    assert isinstance(module, FSDPModule)
    return module


def _num_bytes(modules: Sequence[nn.Module]) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters())

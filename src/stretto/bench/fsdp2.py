"""PyTorch's fully_shard (FSDP2) as a peer, with the settings that its authors recommend."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

ModuleGroups = Sequence[Sequence[nn.Module]]
"""Groups of modules that are gathered and reduced together, in the order of use."""


@dataclass(frozen=True, slots=True)
class FsdpSettings:
    """The settings of FSDP2."""

    reshard: bool
    """Whether parameters are resharded after forward (ZeRO-3), or kept for backward (ZeRO-2)."""
    bf16_parameters: bool = False
    """Whether parameters are gathered and used in bf16."""
    bf16_gradients: bool = False
    """Whether gradients are reduced in bf16."""
    device: str = "cpu"


def group_modules(modules: Sequence[nn.Module], min_bytes: int) -> list[list[nn.Module]]:
    """Join consecutive modules until each group has ``min_bytes`` of parameters."""
    groups: list[list[nn.Module]] = []
    for module in modules:
        if groups and _num_bytes(groups[-1]) < min_bytes:
            groups[-1].append(module)
        else:
            groups.append([module])
    if len(groups) > 1 and _num_bytes(groups[-1]) < min_bytes:
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups


def apply_fully_shard(model: nn.Module, groups: ModuleGroups, settings: FsdpSettings) -> nn.Module:
    """Shard ``model`` over the default process group, and return it.

    Parameters outside all ``groups`` belong to the root module, which is not resharded.
    """
    mesh = init_device_mesh(settings.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if settings.bf16_parameters else None,
        reduce_dtype=torch.bfloat16 if settings.bf16_gradients else None,
    )
    for group in groups:
        fully_shard(
            list(group),
            mesh=mesh,
            reshard_after_forward=settings.reshard,
            mp_policy=policy,
        )
    root = fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    _set_prefetching([root, *(_first_module(group) for group in groups)])
    # Otherwise a gather over Gloo blocks where it starts. Reductions over Gloo always block.
    root._set_unshard_async_op(True)
    return model


def _set_prefetching(modules: list[FSDPModule]) -> None:
    """Make each module start the gather of the next one, in forward and backward."""
    for module, next_module in pairwise(modules):
        module.set_modules_to_forward_prefetch([next_module])
    root, *groups = modules
    for module, next_module in pairwise([root, *reversed(groups)]):
        module.set_modules_to_backward_prefetch([next_module])


def _first_module(group: Sequence[nn.Module]) -> FSDPModule:
    module = group[0]
    assert isinstance(module, FSDPModule)
    return module


def _num_bytes(modules: Sequence[nn.Module]) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters())

"""Which parameters decay and have a ratio, and which do not; told by what they are, not by name."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Modules whose parameters scale and shift what was normalised; the first one is every batch norm,
`nn.SyncBatchNorm` included, and every instance norm."""

UNDECAYED: dict[str, Any] = {"weight_decay": 0.0, "adapt": False}
"""The options of a group with neither decay nor a ratio."""


def undecayed(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters with neither decay nor a ratio.

    Those are all parameters of norms, and biases: parameters with at most one dimension. A tied
    parameter is one of them, under all its names, if any of its owners says so.
    """
    spared = _spared(model)
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if id(parameter) in spared)


def split(
    parameters: Iterable[nn.Parameter], model: nn.Module | None = None
) -> list[dict[str, Any]]:
    """Return ``parameters``, in their order, as the groups of an optimizer: decayed, then not.

    An empty group is left out. Decay is an option of the group, so torch's own optimizers take
    these, too. Parameters that are not the model's are judged by their dimensions.
    """
    mine = list(parameters)
    spared = _spared(model) if model is not None else set()
    spared |= {id(p) for p in mine if p.dim() <= 1}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in mine if id(p) not in spared]},
        {"params": [p for p in mine if id(p) in spared], **UNDECAYED},
    ]
    return [group for group in groups if group["params"]]


def _spared(model: nn.Module) -> set[int]:
    norms = (module for module in model.modules() if isinstance(module, NORMS))
    by_owner = {id(p) for norm in norms for p in norm.parameters(recurse=False)}
    return by_owner | {id(p) for p in model.parameters() if p.dim() <= 1}

"""Tensors that some ranks have and others do not, told by names that are the same everywhere.

What an optimizer remembers is there once a parameter has had a gradient. A parameter that a rank
has not used yet has nothing there, and on another rank it may have; a checkpoint wants one list.
"""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.comm.channel import Channel
from stretto.comm.small import gather_text

_HAD = "had"


def made_alike(tensors: Mapping[str, Tensor], channel: Channel) -> dict[str, Tensor]:
    """Return ``tensors``, zeros for those only others have, and which are which; all together."""
    mine = {name: _form(tensor) for name, tensor in tensors.items()}
    told = [json.loads(text) for text in gather_text(json.dumps(mine), channel)]
    forms = {name: form for of_rank in told for name, form in of_rank.items()}
    alike = {
        name: tensors[name] if name in tensors else _zeros(*forms[name]) for name in sorted(forms)
    }
    return alike | {_HAD: torch.tensor([name in tensors for name in alike], dtype=torch.bool)}


def had(alike: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what of `made_alike` was this rank's own."""
    names = sorted(name for name in alike if name != _HAD)
    marks = alike[_HAD].tolist() if _HAD in alike else [False] * len(names)
    return {name: alike[name] for name, mark in zip(names, marks, strict=True) if mark}


def _form(tensor: Tensor) -> tuple[str, list[int], str]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type


def _zeros(dtype: str, shape: list[int], device: str) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

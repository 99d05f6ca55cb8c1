"""Weights in one safetensors file, to take along: a model's without its head, or anybody's.

A backbone file is an ordinary safetensors file with one remark, ``stretto backbone``: JSON with
the model table, the layers that were left out, the step, and a digest of all tensors. Any other
safetensors file is read as tensors by name.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from stretto.checkpoint.layout import fsync_folder, write_durably
from stretto.checkpoint.manifest import DamagedError
from stretto.checkpoint.shards import digest, pack, refuse_unsupported, unpack_all
from stretto.errors import CheckpointError

SUFFIX = ".safetensors"
"""By which such a file is known from a folder of checkpoints."""

_REMARK = "stretto backbone"


@dataclass(frozen=True, slots=True, eq=False)
class Backbone:
    """Tensors of a model by name, and what is known of where they come from."""

    tensors: Mapping[str, Tensor]
    model: Mapping[str, Any] = field(default_factory=dict)
    """The ``[model]`` table; empty in a file of somebody else's."""
    head: tuple[str, ...] = ()
    """Layers that were left out; none in a file of somebody else's."""
    step: int = 0
    """Optimizer updates they have seen."""


class _Remark(BaseModel):
    """What the file says of itself."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: dict[str, Any]
    head: list[str]
    step: int
    xxh3_128: str


def save_backbone(path: Path, backbone: Backbone) -> int:
    """Write ``backbone`` to ``path``, whole or not at all, and return its bytes.

    Equal backbones make equal files.
    """
    refuse_unsupported(backbone.tensors)
    remark = _Remark(
        model=dict(backbone.model),
        head=list(backbone.head),
        step=backbone.step,
        xxh3_128=digest(backbone.tensors),
    )
    data = pack(backbone.tensors, {_REMARK: remark.model_dump_json()})
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)
        write_durably(aside, data)
        aside.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"{path} could not be written: {error.strerror}") from error
    return len(data)


def load_backbone(path: Path) -> Backbone:
    """Return what the safetensors file ``path`` holds, ours or anybody's.

    Raises:
        CheckpointError: There is no such file, it is torn, or one of ours has changed.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    tensors, remarks = unpack_all(data, where=str(path))
    if _REMARK not in remarks:
        return Backbone(tensors)
    try:
        remark = _Remark.model_validate_json(remarks[_REMARK])
    except ValidationError:
        raise DamagedError(f"{path} does not say what a backbone file must: it changed") from None
    if digest(tensors) != remark.xxh3_128:
        raise DamagedError(
            f"{path} does not have the digest it was written with: a tensor changed; export or "
            "copy it again"
        )
    return Backbone(tensors, remark.model, tuple(remark.head), remark.step)

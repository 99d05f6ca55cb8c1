"""Conversion between tensors and safetensors files, for checkpoints and backbone files.

A checkpoint is split into files of bounded size. A backbone file holds a model's weights without
its head. It is an ordinary safetensors file with one metadata entry, ``stretto backbone``: JSON
with the model table, the layers that were left out, the step, and a digest of all tensors. Any
other safetensors file is read as tensors by name.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, deserialize
from safetensors.torch import save as to_safetensors
from torch import Tensor

from stretto.checkpoint.folders import fsync_folder, write_durably
from stretto.checkpoint.manifest import DamagedCheckpointError, FileEntry, TensorEntry
from stretto.errors import CheckpointError

MAX_FILE_BYTES = 512_000_000
"""Bounds the copy of the state in memory while saving; a larger tensor gets its own file."""

DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "U8": torch.uint8,
}
"""The types that a checkpoint can hold, by their safetensors names."""

_DTYPE_NAMES = {dtype: code for code, dtype in DTYPES.items()}
_METADATA_KEY = "__metadata__"  # the key of safetensors for the metadata of a file


def refuse_unsupported(tensors: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` for the first tensor that could not be restored exactly."""
    for name, tensor in tensors.items():
        if name in ("", _METADATA_KEY) or not name.isprintable():
            raise CheckpointError(f"{name!r} cannot name a tensor: use printable characters")
        if tensor.dtype not in _DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"tensor {name!r} is {tensor.dtype}, {tensor.layout} on {tensor.device}: a"
                f" checkpoint holds dense tensors with values, of {', '.join(sorted(DTYPES))}"
            )


def split_into_files(
    tensors: Mapping[str, Tensor], max_bytes: int
) -> Iterable[tuple[str, dict[str, Tensor]]]:
    """Yield file names with their tensors, in order, with at most ``max_bytes`` per file."""
    count, file_tensors, file_bytes = 0, dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if file_tensors and file_bytes + tensor.nbytes > max_bytes:
            yield _file_name(count), file_tensors
            count, file_tensors, file_bytes = count + 1, {}, 0
        file_tensors[name] = tensor
        file_bytes += tensor.nbytes
    if file_tensors:
        yield _file_name(count), file_tensors


def pack_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of one file; views and tied tensors are each written in full.

    safetensors writes several metadata entries in any order; use at most one for reproducible
    bytes.
    """
    # Always copied, because safetensors refuses tensors that share storage.
    copies = {name: _contiguous_cpu_copy(tensor) for name, tensor in tensors.items()}
    return to_safetensors(copies, dict(metadata) if metadata else None)


def unpack_tensors(
    data: bytes, expected: Mapping[str, TensorEntry], *, where: str
) -> dict[str, Tensor]:
    """Return the tensors in ``data``, which must be exactly the ``expected`` ones."""
    found = _parse_safetensors(data, where)
    if found.keys() != expected.keys():
        unexpected = sorted(found.keys() ^ expected.keys())[0]
        raise DamagedCheckpointError(
            f"{where} and the manifest disagree on whether it holds {unexpected!r}"
        )
    for name, entry in expected.items():
        header = (found[name]["dtype"], list(found[name]["shape"]))
        if header != (entry.dtype, entry.shape) or entry.dtype not in DTYPES:
            raise DamagedCheckpointError(
                f"{where} has tensor {name!r} as {header[0]} {header[1]}, the manifest as"
                f" {entry.dtype} {entry.shape}, known are {', '.join(sorted(DTYPES))}"
            )
    return {
        name: _tensor_from_bytes(found[name]["data"], entry.dtype, entry.shape)
        for name, entry in expected.items()
    }


def unpack_any_tensors(data: bytes, *, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in ``data``, whichever program wrote them, and the file's metadata."""
    tensors: dict[str, Tensor] = {}
    for name, found in _parse_safetensors(data, where).items():
        if found["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{where} has tensor {name!r} as {found['dtype']}, known are"
                f" {', '.join(sorted(DTYPES))}"
            )
        tensors[name] = _tensor_from_bytes(found["data"], found["dtype"], found["shape"])
    header_bytes = int.from_bytes(data[:8], "little")  # valid, because the file was parsed above
    return tensors, json.loads(data[8 : 8 + header_bytes]).get(_METADATA_KEY, {})


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of all names, types, shapes and bits, independent of the order."""
    hasher = xxhash.xxh3_128()
    for name in sorted(tensors):
        dense = _contiguous_cpu_copy(tensors[name])
        hasher.update(f"{name} {_DTYPE_NAMES[dense.dtype]} {list(dense.shape)}\n".encode())
        hasher.update(dense.flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def describe_file(data: bytes) -> FileEntry:
    """Return the size and digest of a file's bytes."""
    return FileEntry(num_bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))


def describe_tensor(tensor: Tensor, file: str) -> TensorEntry:
    """Return the manifest entry for ``tensor``."""
    return TensorEntry(file=file, dtype=_DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape))


def _file_name(count: int) -> str:
    return f"tensors-{count:05d}.safetensors"


def _contiguous_cpu_copy(tensor: Tensor) -> Tensor:
    dense = tensor.detach().resolve_conj().resolve_neg()
    return dense.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _parse_safetensors(data: bytes, where: str) -> dict[str, dict[str, Any]]:
    try:
        return dict(deserialize(data))  # type: ignore[no-untyped-call] # its stub has no types
    except SafetensorError as error:
        raise DamagedCheckpointError(f"{where} is not a safetensors file: {str(error)!r}") from None


def _tensor_from_bytes(data: bytearray, dtype: str, shape: list[int]) -> Tensor:
    if not data:  # frombuffer refuses a buffer without bytes
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(data, dtype=DTYPES[dtype]).reshape(shape)


BACKBONE_SUFFIX = ".safetensors"
"""Suffix of a backbone file; a checkpoint is a folder."""

_BACKBONE_KEY = "stretto backbone"


@dataclass(frozen=True, slots=True, eq=False)
class Backbone:
    """Tensors of a model by name, and where they come from."""

    tensors: Mapping[str, Tensor]
    model: Mapping[str, Any] = field(default_factory=dict)
    """The ``[model]`` table; empty for a file that stretto did not write."""
    head: tuple[str, ...] = ()
    """Layers that were left out; empty for a file that stretto did not write."""
    step: int = 0
    """Optimizer updates behind these weights."""


class _BackboneMetadata(BaseModel):
    """The metadata entry of a backbone file."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: dict[str, Any]
    head: list[str]
    step: int
    xxh3_128: str


def save_backbone(path: Path, backbone: Backbone) -> int:
    """Write ``backbone`` to ``path`` atomically and return the size of the file in bytes.

    Equal backbones make equal files.
    """
    refuse_unsupported(backbone.tensors)
    backbone_metadata = _BackboneMetadata(
        model=dict(backbone.model),
        head=list(backbone.head),
        step=backbone.step,
        xxh3_128=tensors_digest(backbone.tensors),
    )
    data = pack_tensors(backbone.tensors, {_BACKBONE_KEY: backbone_metadata.model_dump_json()})
    staging = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        staging.unlink(missing_ok=True)
        write_durably(staging, data)
        staging.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise CheckpointError(f"{path} could not be written: {error.strerror}") from error
    return len(data)


def load_backbone(path: Path) -> Backbone:
    """Return the tensors of the safetensors file ``path``, with metadata if stretto wrote it.

    Raises:
        CheckpointError: The file is missing or damaged, or its digest does not match.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    tensors, metadata = unpack_any_tensors(data, where=str(path))
    if _BACKBONE_KEY not in metadata:
        return Backbone(tensors)
    try:
        backbone_metadata = _BackboneMetadata.model_validate_json(metadata[_BACKBONE_KEY])
    except ValidationError:
        raise DamagedCheckpointError(
            f"{path} does not say what a backbone file must: it changed"
        ) from None
    if tensors_digest(tensors) != backbone_metadata.xxh3_128:
        raise DamagedCheckpointError(
            f"{path} does not have the digest it was written with: a tensor changed; export or "
            "copy it again"
        )
    return Backbone(
        tensors, backbone_metadata.model, tuple(backbone_metadata.head), backbone_metadata.step
    )

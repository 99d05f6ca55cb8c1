"""Tensors to safetensors bytes and back; one checkpoint is cut into files of bounded size."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, deserialize
from safetensors.torch import save as to_safetensors
from torch import Tensor

from stretto.checkpoint.manifest import DamagedError, FileEntry, TensorEntry
from stretto.errors import CheckpointError

MAX_FILE_BYTES = 512_000_000
"""Bounds the copy of the state that is in memory while saving; a larger tensor has its own file."""

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
"""What a checkpoint can hold, by the name safetensors gives it."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_RESERVED = "__metadata__"  # safetensors keeps its own remarks under this name


def refuse_unsupported(tensors: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` for the first tensor that could not be read back as it is."""
    for name, tensor in tensors.items():
        if name in ("", _RESERVED) or not name.isprintable():
            raise CheckpointError(f"{name!r} cannot name a tensor: use printable characters")
        if tensor.dtype not in _CODES or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"tensor {name!r} is {tensor.dtype}, {tensor.layout} on {tensor.device}: a"
                f" checkpoint holds dense tensors with values, of {', '.join(sorted(DTYPES))}"
            )


def split(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterable[tuple[str, dict[str, Tensor]]]:
    """Yield file names with the tensors each shall hold, in order, at most ``max_bytes`` each."""
    count, held, held_bytes = 0, dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if held and held_bytes + tensor.nbytes > max_bytes:
            yield _file_name(count), held
            count, held, held_bytes = count + 1, {}, 0
        held[name] = tensor
        held_bytes += tensor.nbytes
    if held:
        yield _file_name(count), held


def pack(tensors: Mapping[str, Tensor], remarks: Mapping[str, str] | None = None) -> bytes:
    """Return one file's bytes; views and tied tensors are each written whole.

    Two remarks or more come out in any order: for equal bytes, make one of them.
    """
    # Copied even where that is not needed: safetensors refuses tensors that share storage.
    owned = {name: _own_copy(tensor) for name, tensor in tensors.items()}
    return to_safetensors(owned, dict(remarks) if remarks else None)


def unpack(data: bytes, expected: Mapping[str, TensorEntry], *, where: str) -> dict[str, Tensor]:
    """Return the tensors in ``data``, which must be exactly the ``expected`` ones."""
    found = _parsed(data, where)
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())[0]
        raise DamagedError(f"{where} and the manifest disagree on whether it holds {odd!r}")
    for name, entry in expected.items():
        header = (found[name]["dtype"], list(found[name]["shape"]))
        if header != (entry.dtype, entry.shape) or entry.dtype not in DTYPES:
            raise DamagedError(
                f"{where} has tensor {name!r} as {header[0]} {header[1]}, the manifest as"
                f" {entry.dtype} {entry.shape}, known are {', '.join(sorted(DTYPES))}"
            )
    return {
        name: _tensor(found[name]["data"], entry.dtype, entry.shape)
        for name, entry in expected.items()
    }


def unpack_all(data: bytes, *, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in ``data``, whoever wrote them, and the remarks beside them."""
    tensors: dict[str, Tensor] = {}
    for name, found in _parsed(data, where).items():
        if found["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{where} has tensor {name!r} as {found['dtype']}, known are"
                f" {', '.join(sorted(DTYPES))}"
            )
        tensors[name] = _tensor(found["data"], found["dtype"], found["shape"])
    header_bytes = int.from_bytes(data[:8], "little")  # in order, or it had not been parsed
    return tensors, json.loads(data[8 : 8 + header_bytes]).get(_RESERVED, {})


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a fingerprint of names, types, shapes and every bit, whatever their order."""
    told = xxhash.xxh3_128()
    for name in sorted(tensors):
        whole = _own_copy(tensors[name])
        told.update(f"{name} {_CODES[whole.dtype]} {list(whole.shape)}\n".encode())
        told.update(whole.flatten().view(torch.uint8).numpy().data)
    return told.hexdigest()


def describe_file(data: bytes) -> FileEntry:
    """Return the size and digest by which a file's bytes are known again."""
    return FileEntry(num_bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))


def describe_tensor(tensor: Tensor, file: str) -> TensorEntry:
    """Return the manifest's line for ``tensor``."""
    return TensorEntry(file=file, dtype=_CODES[tensor.dtype], shape=list(tensor.shape))


def _file_name(count: int) -> str:
    return f"tensors-{count:05d}.safetensors"


def _own_copy(tensor: Tensor) -> Tensor:
    whole = tensor.detach().resolve_conj().resolve_neg()
    return whole.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _parsed(data: bytes, where: str) -> dict[str, dict[str, Any]]:
    try:
        return dict(deserialize(data))  # type: ignore[no-untyped-call] # its stub has no types
    except SafetensorError as error:
        raise DamagedError(f"{where} is not a safetensors file: {str(error)!r}") from None


def _tensor(data: bytearray, dtype: str, shape: list[int]) -> Tensor:
    if not data:  # frombuffer refuses a buffer without bytes
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(data, dtype=DTYPES[dtype]).reshape(shape)

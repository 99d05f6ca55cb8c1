"""The manifest of a checkpoint: its format and validation; the input is treated as hostile."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from stretto.checkpoint.folders import MANIFEST, MAX_STEP
from stretto.errors import CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointState:
    """The complete state of a run: named tensors, JSON facts and the step."""

    step: int
    """Optimizer updates done so far."""
    tensors: Mapping[str, Tensor]
    """Tensors by name; the part before the first slash is the owner: ``model/fc.weight``."""
    facts: Mapping[str, Any]
    """JSON values: optimizer groups, seed, data position, world size, config digest."""

    def tensors_under(self, owner: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with ``owner/``, without that prefix."""
        prefix = f"{owner}/"
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Path, size and duration of one save."""

    path: Path
    num_bytes: int
    """Size of all files, manifest included."""
    seconds: float


SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 64 * 2**20
"""Enough for about 300,000 tensors; a larger file is not parsed."""
MAX_DEPTH = 32
"""Largest nesting of lists and objects; deeper JSON is refused before it is traversed."""
MAX_ELEMENTS = 2**60
"""Largest tensor; keeps shape arithmetic within 64 bits."""

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
_FILE_NAME = r"^tensors-[0-9]{5}\.safetensors$"


class DamagedCheckpointError(CheckpointError):
    """The bytes on disk differ from those written; an older checkpoint may be intact."""


class FileEntry(BaseModel):
    """Size and digest of one tensor file."""

    model_config = _STRICT

    num_bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class TensorEntry(BaseModel):
    """File, type and shape of one tensor."""

    model_config = _STRICT

    file: str = Field(pattern=_FILE_NAME)
    dtype: str
    """The name used by safetensors: ``F32``, ``BF16``."""
    shape: list[int] = Field(max_length=64)


class Manifest(BaseModel):
    """The table of contents of one checkpoint."""

    model_config = _STRICT

    schema_version: int
    step: int = Field(ge=0, le=MAX_STEP)
    generation: int = Field(ge=0)
    facts: dict[str, Any]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    def tensors_in(self, file: str) -> dict[str, TensorEntry]:
        """Return the tensors that ``file`` must contain exactly."""
        return {name: entry for name, entry in self.tensors.items() if entry.file == file}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON that `decode_manifest` accepts; floats are preserved exactly."""
    try:
        data = json.dumps(manifest.model_dump(), indent=1).encode()
    except ValueError as error:
        raise CheckpointError(f"the state cannot be written as JSON: {error}") from error
    try:
        decode_manifest(data, where="the manifest about to be written")
    except DamagedCheckpointError as error:
        raise CheckpointError(f"{error}; make the state smaller or simpler") from error
    return data


def manifest_digest_line(manifest_json: bytes) -> bytes:
    """Return the content of ``manifest.sha256``, in the format of ``sha256sum -c``."""
    return f"{hashlib.sha256(manifest_json).hexdigest()}  {MANIFEST}\n".encode()


def decode_manifest(data: bytes, *, where: str) -> Manifest:
    """Parse and validate the manifest in ``data``.

    Raises:
        DamagedCheckpointError: The manifest is not valid.
        CheckpointError: The schema is newer than this version. This is not damage: an old version
            must not quarantine good checkpoints.
    """
    content = _parse_json(data, where)
    version = content.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise CheckpointError(
            f"{where} has schema version {version}, this version of stretto reads up to"
            f" {SCHEMA_VERSION}; use the version that wrote it"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(str(part) for part in first["loc"])
        raise DamagedCheckpointError(
            f"{where} is wrong at {location!r}: {first['msg'].lower()}"
        ) from None
    _check_consistency(manifest, where)
    return manifest


def to_plain_json(value: object, *, where: str, depth: int = 1) -> Any:  # noqa: ANN401 - any JSON value
    """Return ``value`` in JSON's own types (tuples become lists); refuse any other type."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where} is nested deeper than {MAX_DEPTH} levels; flatten it")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [
            to_plain_json(item, where=f"{where}[{i}]", depth=depth + 1)
            for i, item in enumerate(value)
        ]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            key: to_plain_json(item, where=f"{where}.{key}", depth=depth + 1)
            for key, item in value.items()
        }
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold; facts are numbers, strings,"
        " lists and tables with strings as keys, tensors belong among the tensors"
    )


def _parse_json(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_MANIFEST_BYTES:
        raise DamagedCheckpointError(
            f"{where} has {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}"
        )
    try:
        content = json.loads(data, object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where} is not the JSON it should be: {error}") from None
    if not isinstance(content, dict):
        raise DamagedCheckpointError(f"{where} is a JSON {type(content).__name__}, not an object")
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH + 1):
        level = [child for value in level for child in _children(value)]
    if level:
        raise DamagedCheckpointError(f"{where} is nested deeper than {MAX_DEPTH} levels")
    return content


def _children(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return table


def _check_consistency(manifest: Manifest, where: str) -> None:
    """Refuse a manifest of the right form whose content contradicts itself."""
    if manifest.schema_version != SCHEMA_VERSION:
        raise DamagedCheckpointError(
            f"{where} has schema version {manifest.schema_version}, there is none"
        )
    for name, entry in manifest.tensors.items():
        if entry.file not in manifest.files:
            raise DamagedCheckpointError(
                f"{where} puts tensor {name!r} in unlisted file {entry.file}"
            )
        if min(entry.shape, default=0) < 0 or prod(n or 1 for n in entry.shape) > MAX_ELEMENTS:
            raise DamagedCheckpointError(f"{where} gives tensor {name!r} the shape {entry.shape}")
    unused = manifest.files.keys() - {entry.file for entry in manifest.tensors.values()}
    if unused:
        raise DamagedCheckpointError(
            f"{where} lists {sorted(unused)[0]!r}, which no tensor lies in"
        )

"""The manifest of a checkpoint: what should be in the folder, read as if an enemy wrote it."""

import hashlib
import json
from collections.abc import Mapping
from math import prod
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stretto.checkpoint.layout import MANIFEST, MAX_STEP
from stretto.errors import CheckpointError

SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 64 * 2**20
"""About 300,000 tensors; a larger file is refused unread."""
MAX_DEPTH = 32
"""Of nested lists and objects; deeper JSON is refused before anybody walks it."""
MAX_ELEMENTS = 2**60
"""Of one tensor; keeps the arithmetic on shapes inside 64 bits."""

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
_FILE_NAME = r"^tensors-[0-9]{5}\.safetensors$"


class DamagedError(CheckpointError):
    """The bytes on disk are not the ones that were written; an older checkpoint may serve."""


class FileEntry(BaseModel):
    """One tensor file: enough to notice any change of it."""

    model_config = _STRICT

    num_bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class TensorEntry(BaseModel):
    """One tensor: where it lies and what it looks like."""

    model_config = _STRICT

    file: str = Field(pattern=_FILE_NAME)
    dtype: str
    """As safetensors spells it: ``F32``, ``BF16``."""
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
        """Return the tensors that ``file`` should hold, no more and no fewer."""
        return {name: entry for name, entry in self.tensors.items() if entry.file == file}


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON that `decode` accepts; floats survive exactly."""
    try:
        data = json.dumps(manifest.model_dump(), indent=1).encode()
    except ValueError as error:
        raise CheckpointError(f"the state cannot be written as JSON: {error}") from error
    try:
        decode(data, where="the manifest about to be written")
    except DamagedError as error:
        raise CheckpointError(f"{error}; make the state smaller or simpler") from error
    return data


def seal_of(manifest_json: bytes) -> bytes:
    """Return the content of the seal file, in the form ``sha256sum -c`` reads."""
    return f"{hashlib.sha256(manifest_json).hexdigest()}  {MANIFEST}\n".encode()


def decode(data: bytes, *, where: str) -> Manifest:
    """Return the manifest in ``data``; whatever is wrong with it is a `CheckpointError`.

    A newer schema is not damage: it is reported as what it is, so that a run started by an
    old version does not push good checkpoints aside.
    """
    content = _parse(data, where)
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
        place = ".".join(str(part) for part in first["loc"])
        raise DamagedError(f"{where} is wrong at {place!r}: {first['msg'].lower()}") from None
    _check(manifest, where)
    return manifest


def plain(value: object, *, where: str, depth: int = 1) -> Any:  # noqa: ANN401 - any JSON value
    """Return ``value`` in JSON's own types (tuples become lists), or say what is not plain."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where} is nested deeper than {MAX_DEPTH} levels; flatten it")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, where=f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            key: plain(item, where=f"{where}.{key}", depth=depth + 1) for key, item in value.items()
        }
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold; facts are numbers, words,"
        " lists and tables with words as keys, tensors belong among the tensors"
    )


def _parse(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_MANIFEST_BYTES:
        raise DamagedError(f"{where} has {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}")
    try:
        content = json.loads(data, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is not the JSON it should be: {error}") from None
    if not isinstance(content, dict):
        raise DamagedError(f"{where} is a JSON {type(content).__name__}, not an object")
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH + 1):
        level = [child for value in level for child in _children(value)]
    if level:
        raise DamagedError(f"{where} is nested deeper than {MAX_DEPTH} levels")
    return content


def _children(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return table


def _check(manifest: Manifest, where: str) -> None:
    """Refuse what has the right form but cannot be true."""
    if manifest.schema_version != SCHEMA_VERSION:
        raise DamagedError(f"{where} has schema version {manifest.schema_version}, there is none")
    for name, entry in manifest.tensors.items():
        if entry.file not in manifest.files:
            raise DamagedError(f"{where} puts tensor {name!r} in unlisted file {entry.file}")
        if min(entry.shape, default=0) < 0 or prod(n or 1 for n in entry.shape) > MAX_ELEMENTS:
            raise DamagedError(f"{where} gives tensor {name!r} the shape {entry.shape}")
    idle = manifest.files.keys() - {entry.file for entry in manifest.tensors.values()}
    if idle:
        raise DamagedError(f"{where} lists {sorted(idle)[0]!r}, which no tensor lies in")

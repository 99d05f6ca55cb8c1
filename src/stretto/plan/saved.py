"""Values that are saved as JSON and read again, by people's hands or a program's."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from stretto.errors import ConfigError


class Value(BaseModel):
    """Something that never changes, and holds nothing but what it should."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Saved(Value):
    """A value with a file of its own, which says how it is to be read."""

    schema_version: int


_Saved = TypeVar("_Saved", bound=Saved)


def read_saved(path: Path, kind: type[_Saved], name: str, schema: int) -> _Saved:
    """Read a value of ``kind``, which people call ``name``.

    Raises:
        ConfigError: There is no such file, or it holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as wrong:
        reason = getattr(wrong, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot read the {name} {path}: {reason}") from None
    try:
        value = kind.model_validate_json(text)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ConfigError(f"{path} is not a {name}: {where}: {first['msg']}") from None
    if value.schema_version != schema:
        raise ConfigError(
            f"{path} is a {name} of version {value.schema_version}, this program reads {schema}: "
            "make it anew"
        )
    return value

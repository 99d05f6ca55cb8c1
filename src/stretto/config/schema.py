"""`Config`, the base class of all tables, and queries about tables, kinds and expected values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

_EXPECTED_TYPE_NAMES: Mapping[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path as text",
}
_LIMIT_TEXTS: Mapping[str, str] = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "multiple_of": "a multiple of {}",
    "min_length": "of length at least {}",
    "max_length": "of length at most {}",
    "pattern": "matching {}",
}


class Config(BaseModel):
    """A table of a run file: frozen, with strict types; unknown keys are errors.

    The string under a field is its help. Fields hold text, numbers, paths, tuples, mappings,
    other configs, and unions of configs with ``kind`` as discriminator.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
    )


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key of a config: its path, its expected type and limits, and the class that owns it."""

    path: tuple[str, ...]
    expected_type: object = None
    limits: tuple[object, ...] = ()
    owner: type[Config] | None = None


def table_classes(annotation: object) -> tuple[type[Config], ...]:
    """Return the config classes that ``annotation``, or the items of its list, accept."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return (annotation,)
    if _is_mapping(annotation):
        return ()
    return tuple(table for part in get_args(annotation) for table in table_classes(part))


def kind_values(table: type[Config]) -> tuple[str, ...]:
    """Return the values of ``kind`` that select ``table``; empty if it has no kind."""
    field = table.model_fields.get("kind")
    return tuple(allowed_values(field.annotation)) if field else ()


def select_table_class(tables: Sequence[type[Config]], kind: object) -> type[Config] | None:
    """Return the class in ``tables`` that ``kind`` selects; a single class needs no kind."""
    if len(tables) == 1:
        return tables[0]
    return next((table for table in tables if kind in kind_values(table)), None)


def allowed_values(annotation: object) -> list[str]:
    """Return the values that the Literals and Enums of ``annotation`` list."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(member.value) for member in annotation]
    return [choice for part in get_args(annotation) for choice in allowed_values(part)]


def locate_key(model: type[Config], user_value: object, location: Sequence[str | int]) -> ConfigKey:
    """Return the user's key for a validator's ``location`` in ``user_value``.

    Validation inserts the kind of a table, or the member of a union, between two keys. Such parts
    of ``location`` are skipped.
    """
    config_key, at_kind = ConfigKey((), expected_type=model), False
    for part in location:
        if at_kind:
            at_kind = False
            continue
        child = _child_key(config_key, user_value, part)
        if child is None:
            continue
        config_key, user_value = child, _child_value(user_value, part)
        at_kind = isinstance(user_value, dict) and len(table_classes(config_key.expected_type)) > 1
    return config_key


def accepts_key(model: type[Config], user_value: object, path: Sequence[str]) -> bool:
    """Return whether ``path`` is a valid key of a table or mapping in ``user_value``."""
    config_key = ConfigKey((), expected_type=model)
    for part in path[:-1]:
        key = int(part) if isinstance(user_value, list) and part.isdecimal() else part
        child = _child_key(config_key, user_value, key)
        if child is None:
            return False
        config_key, user_value = child, _child_value(user_value, key)
    if not isinstance(user_value, dict):
        return False
    tables = table_classes(config_key.expected_type)
    chosen = select_table_class(tables, user_value.get("kind"))
    is_known = any(path[-1] in table.model_fields for table in ((chosen,) if chosen else tables))
    return is_known or _is_mapping(config_key.expected_type)


def describe_expected(annotation: object, limits: Iterable[object] = ()) -> str:
    """Return a text that describes the values ``annotation`` accepts, with ``limits``."""
    return ", ".join([_describe_annotation(annotation), *_describe_limits(limits)])


def _child_key(config_key: ConfigKey, user_value: object, part: str | int) -> ConfigKey | None:
    """Return the key one level below ``config_key``, or None if the user has no key ``part``."""
    path, tables = (*config_key.path, str(part)), table_classes(config_key.expected_type)
    if isinstance(user_value, list) and isinstance(part, int):
        return ConfigKey(path, _item_annotation(config_key.expected_type, part))
    if not isinstance(user_value, dict):
        return None
    owner = select_table_class(tables, user_value.get("kind"))
    field = owner.model_fields.get(str(part)) if owner else None
    if field is not None:
        return ConfigKey(path, field.annotation, tuple(field.metadata), owner)
    if part not in user_value:
        return None
    return ConfigKey(
        path, None if tables else _item_annotation(config_key.expected_type, -1), owner=owner
    )


def _child_value(user_value: object, part: str | int) -> object:
    if isinstance(user_value, list) and isinstance(part, int):
        return user_value[part]
    return user_value.get(part) if isinstance(user_value, dict) else None


def _item_annotation(annotation: object, index: int) -> object:
    generic_type, parts = (
        get_origin(annotation),
        [p for p in get_args(annotation) if p is not Ellipsis],
    )
    if generic_type is Annotated:
        return _item_annotation(parts[0], index)
    if generic_type in (Union, UnionType):
        return next((item for p in parts if (item := _item_annotation(p, index)) is not None), None)
    return parts[min(index, len(parts) - 1)] if parts and generic_type is not Literal else None


def _describe_annotation(annotation: object) -> str:
    generic_type, parts = get_origin(annotation), get_args(annotation)
    if generic_type is Annotated:
        return describe_expected(
            parts[0], [limit for part in parts[1:] for limit in _flatten_limits(part)]
        )
    if generic_type is Literal or (isinstance(annotation, type) and issubclass(annotation, Enum)):
        choices = [f'"{choice}"' for choice in allowed_values(annotation)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if _is_list(annotation):
        return "a list"
    if table_classes(annotation) or _is_mapping(annotation):
        return "a table"
    if generic_type in (Union, UnionType):
        return " or ".join(
            dict.fromkeys(_describe_annotation(p) for p in parts if p is not NoneType)
        )
    return _EXPECTED_TYPE_NAMES.get(annotation) or str(
        getattr(annotation, "__name__", "another value")
    )


def _is_list(annotation: object) -> bool:
    generic_type = get_origin(annotation)
    return isinstance(generic_type, type) and issubclass(generic_type, (Sequence, set, frozenset))


def _is_mapping(annotation: object) -> bool:
    generic_type = get_origin(annotation)
    return isinstance(generic_type, type) and issubclass(generic_type, Mapping)


def _flatten_limits(limit: object) -> list[object]:
    return list(limit.metadata) if isinstance(limit, FieldInfo) else [limit]


def _describe_limits(limits: Iterable[object]) -> list[str]:
    return [
        text.format(bound)
        for limit in limits
        for name, text in _LIMIT_TEXTS.items()
        if (bound := getattr(limit, name, None)) is not None
    ]

"""What a config class looks like from outside: its tables, its kinds, and what each key takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

_WORDS: Mapping[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path as text",
}
_LIMITS: Mapping[str, str] = {
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
    """A table of a run file: frozen, strict about types, closed to unknown keys.

    The string under a field is its help. Fields hold text, numbers, paths, tuples, mappings,
    other configs, and unions of configs told apart by ``kind``.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


@dataclass(frozen=True, slots=True)
class Place:
    """One key of a tree: where it is, what it should hold, and which table it belongs to."""

    path: tuple[str, ...]
    wanted: object = None
    limits: tuple[object, ...] = ()
    owner: type[Config] | None = None


def tables_of(annotation: object) -> tuple[type[Config], ...]:
    """Return the config classes that a value of ``annotation`` or an item of its list may be."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return (annotation,)
    if _is_mapping(annotation):
        return ()
    return tuple(table for part in get_args(annotation) for table in tables_of(part))


def kinds_of(table: type[Config]) -> tuple[str, ...]:
    """Return the values of ``kind`` that select ``table``; none where it has no kind."""
    field = table.model_fields.get("kind")
    return tuple(choices_of(field.annotation)) if field else ()


def choose(tables: Sequence[type[Config]], kind: object) -> type[Config] | None:
    """Return the one of ``tables`` that ``kind`` selects; a lone table needs no kind."""
    if len(tables) == 1:
        return tables[0]
    return next((table for table in tables if kind in kinds_of(table)), None)


def choices_of(annotation: object) -> list[str]:
    """Return the words that ``annotation`` names one by one."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(member.value) for member in annotation]
    return [choice for part in get_args(annotation) for choice in choices_of(part)]


def locate(model: type[Config], given: object, location: Sequence[str | int]) -> Place:
    """Follow a validator's ``location`` down ``given``, leaving out names the user never wrote.

    Validation inserts the kind of a table, or the member of a union, between two keys.
    """
    place, at_kind = Place((), wanted=model), False
    for part in location:
        if at_kind:
            at_kind = False
            continue
        following = _enter(place, given, part)
        if following is None:
            continue
        place, given = following, _inside(given, part)
        at_kind = isinstance(given, dict) and len(tables_of(place.wanted)) > 1
    return place


def takes(model: type[Config], given: object, path: Sequence[str]) -> bool:
    """Say whether ``path``, as the user writes it, is a key of a table or mapping in ``given``."""
    place = Place((), wanted=model)
    for part in path[:-1]:
        key = int(part) if isinstance(given, list) and part.isdecimal() else part
        following = _enter(place, given, key)
        if following is None:
            return False
        place, given = following, _inside(given, key)
    if not isinstance(given, dict):
        return False
    tables = tables_of(place.wanted)
    chosen = choose(tables, given.get("kind"))
    known = any(path[-1] in table.model_fields for table in ((chosen,) if chosen else tables))
    return known or _is_mapping(place.wanted)


def expected(annotation: object, limits: Iterable[object] = ()) -> str:
    """Return what ``annotation`` takes, in words."""
    words = [_plain_words(annotation), *_limits_in_words(limits)]
    return ", ".join(words)


def _enter(place: Place, given: object, part: str | int) -> Place | None:
    """Return the place one key further down, or None where ``part`` is no key of the user's."""
    path, tables = (*place.path, str(part)), tables_of(place.wanted)
    if isinstance(given, list) and isinstance(part, int):
        return Place(path, _item_of(place.wanted, part))
    if not isinstance(given, dict):
        return None
    owner = choose(tables, given.get("kind"))
    field = owner.model_fields.get(str(part)) if owner else None
    if field is not None:
        return Place(path, field.annotation, tuple(field.metadata), owner)
    if part not in given:
        return None
    return Place(path, None if tables else _item_of(place.wanted, -1), owner=owner)


def _inside(given: object, part: str | int) -> object:
    if isinstance(given, list) and isinstance(part, int):
        return given[part]
    return given.get(part) if isinstance(given, dict) else None


def _item_of(annotation: object, index: int) -> object:
    origin, parts = get_origin(annotation), [p for p in get_args(annotation) if p is not Ellipsis]
    if origin is Annotated:
        return _item_of(parts[0], index)
    if origin in (Union, UnionType):
        return next((item for p in parts if (item := _item_of(p, index)) is not None), None)
    return parts[min(index, len(parts) - 1)] if parts and origin is not Literal else None


def _plain_words(annotation: object) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return expected(parts[0], [limit for part in parts[1:] for limit in _flat(part)])
    if origin is Literal or (isinstance(annotation, type) and issubclass(annotation, Enum)):
        choices = [f'"{choice}"' for choice in choices_of(annotation)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if _is_list(annotation):
        return "a list"
    if tables_of(annotation) or _is_mapping(annotation):
        return "a table"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_plain_words(p) for p in parts if p is not NoneType))
    return _WORDS.get(annotation) or str(getattr(annotation, "__name__", "another value"))


def _is_list(annotation: object) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, (Sequence, set, frozenset))


def _is_mapping(annotation: object) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _flat(limit: object) -> list[object]:
    return list(limit.metadata) if isinstance(limit, FieldInfo) else [limit]


def _limits_in_words(limits: Iterable[object]) -> list[str]:
    return [
        words.format(bound)
        for limit in limits
        for name, words in _LIMITS.items()
        if (bound := getattr(limit, name, None)) is not None
    ]

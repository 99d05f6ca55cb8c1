"""What the validator found, said in the user's words: where, which key, what was expected."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time

from pydantic_core import ErrorDetails

from stretto.config.shape import Config, Place, choices_of, expected, kinds_of, locate, tables_of
from stretto.config.text import dotted, listed, nearest, printable, shown, suggestion
from stretto.config.tree import DEFAULT, OVERRIDE, Table, leaves, plain

_GOT: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number with a fraction",
    str: "text",
    list: "a list",
    dict: "a table",
    date: "a date or time",
    time: "a date or time",
}
_WRONG_TYPE = ("_type", "_from_float", "_parsing")
_OWN_WORDS = ("value_error", "assertion_error")
_UNSET = object()

TOO_DEEP = "lists or tables nested too deeply; no setting needs that"


@dataclass(frozen=True, slots=True)
class _Problem:
    """One finding, put where the user will look for it."""

    type: str
    place: Place
    value: object
    where: str
    reason: str

    @property
    def key(self) -> str:
        return dotted(self.place.path)


def explain(
    model: type[Config],
    table: Table,
    errors: Sequence[ErrorDetails],
    source: str,
    taken_back: Collection[tuple[str, ...]] = (),
) -> str:
    """Return one message for all ``errors`` of validating ``table``.

    ``source`` names the origin of what is not there: the file a missing key is missing in. Keys
    that were ``taken_back`` are missing because an override says so.
    """
    by_key: dict[tuple[str, ...], str] = {}
    for error in errors:
        problem = _problem(model, table, error, source)
        if problem.type == "missing" and problem.place.path in taken_back:
            problem = replace(problem, where=OVERRIDE)
        # A union reports once for each of its members; the first one speaks for all.
        by_key.setdefault(problem.place.path, printable(_sentence(problem)))
    return listed(list(by_key.values()))


def _problem(model: type[Config], table: Table, error: ErrorDetails, source: str) -> _Problem:
    place = locate(model, plain(table), error["loc"])
    value: object = plain(table)
    for key in place.path:
        if isinstance(value, list):
            value = value[int(key)]
        else:
            value = value.get(key, _UNSET) if isinstance(value, dict) else _UNSET
    cause = error.get("ctx", {}).get("error")
    reason = str(cause) if isinstance(cause, Exception) else error["msg"]
    return _Problem(error["type"], place, value, _origins(table, place.path) or source, reason)


def _origins(table: Table, path: tuple[str, ...]) -> str:
    found = [leaf.origin for at, leaf in leaves(table) if at[: len(path)] == path]
    set_by_user = [origin for origin in found if origin != DEFAULT]
    return " and ".join(dict.fromkeys(set_by_user or found))


def _sentence(problem: _Problem) -> str:
    if problem.type == "json_invalid":
        return f"{problem.where}: {TOO_DEEP}"
    if problem.type in ("union_tag_invalid", "union_tag_not_found"):
        return _about_kind(problem)
    if problem.type == "extra_forbidden":
        return _about_unknown(problem)
    if problem.type == "missing":
        return _about_missing(problem)
    if problem.type in _OWN_WORDS or problem.place.wanted is None or not problem.key:
        return f"{_subject(problem)}: {problem.reason}"
    return _about_value(problem)


def _about_missing(problem: _Problem) -> str:
    wanted = expected(problem.place.wanted, problem.place.limits)
    if problem.where != OVERRIDE:
        return f"{problem.where}: {problem.key} is missing; expected {wanted}"
    quoted = f"; to mean empty text, quote it: {problem.key}='\"\"'" if "text" in wanted else ""
    return (
        f"{problem.where}: {problem.key}= takes back a key without a default; "
        f"expected {wanted}{quoted}"
    )


def _about_kind(problem: _Problem) -> str:
    kinds = [kind for table in tables_of(problem.place.wanted) for kind in kinds_of(table)]
    key = dotted((*problem.place.path, "kind"))
    value = problem.value.get("kind", _UNSET) if isinstance(problem.value, dict) else _UNSET
    if value is _UNSET:
        return f"{problem.where}: {key} is missing; expected one of: {', '.join(kinds)}"
    names = suggestion(str(value), kinds, "known kinds")
    return f"{problem.where}: {key} = {shown(value)}: unknown kind{names}"


def _about_unknown(problem: _Problem) -> str:
    *parents, name = problem.place.path
    known = list(problem.place.owner.model_fields) if problem.place.owner else []
    names = suggestion(name, known, f"known in {dotted(parents)}" if parents else "known")
    if isinstance(problem.value, dict):
        return f"{_innermost(problem)}: unknown table {shown(name)}{names}"
    return f"{_subject(problem)}: unknown key{names}"


def _about_value(problem: _Problem) -> str:
    wanted, value = problem.place.wanted, problem.value
    takes = expected(wanted, problem.place.limits)
    if isinstance(value, dict) and takes != "a table":
        return _about_keys_inside(problem, takes)
    if problem.type == "finite_number":
        return f"{_subject(problem)}: expected a finite number"
    got = f"; got {_kind_of_value(value)}" if problem.type.endswith(_WRONG_TYPE) else ""
    if got and "text" in takes and problem.where == OVERRIDE and isinstance(value, int | float):
        got += f"; to mean text, quote it: {problem.key}='\"{value}\"'"
    guess = nearest(value, choices_of(wanted)) if isinstance(value, str) else ""
    kinds = [kind for table in tables_of(wanted) for kind in kinds_of(table)]
    if isinstance(value, str) and value in kinds:
        guess = f"; did you mean {problem.key}.kind = {shown(value)}?"
    return f"{_subject(problem)}: expected {takes}{got}{guess}"


def _about_keys_inside(problem: _Problem, takes: str) -> str:
    items = "; give it whole, or name an item it has, from 0" if takes.startswith("a list") else ""
    return f"{_innermost(problem)}: {problem.key} is not a table; expected {takes}{items}"


def _innermost(problem: _Problem) -> str:
    """Name the first setting inside a table that should not be there, as the user wrote it."""
    path, inner = problem.place.path, problem.value
    while isinstance(inner, dict) and inner:
        key, inner = next(iter(inner.items()))
        path = (*path, key)
    return f"{problem.where}: {dotted(path)} = {shown(inner)}"


def _subject(problem: _Problem) -> str:
    if not problem.key:
        return problem.where
    if isinstance(problem.value, dict) or problem.value is _UNSET:
        return f"{problem.where}: {problem.key}"
    return f"{problem.where}: {problem.key} = {shown(problem.value)}"


def _kind_of_value(value: object) -> str:
    return next((words for kind, words in _GOT.items() if isinstance(value, kind)), "nothing")

"""Turn validation errors into messages that name the source, the key and the expected value."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time

from pydantic_core import ErrorDetails

from stretto.config.formatting import (
    did_you_mean,
    dotted_key,
    escape_unprintable,
    join_problems,
    shorten_value,
    suggest_known_name,
)
from stretto.config.schema import (
    Config,
    ConfigKey,
    allowed_values,
    describe_expected,
    kind_values,
    locate_key,
    table_classes,
)
from stretto.config.tree import (
    SOURCE_DEFAULT,
    SOURCE_OVERRIDE,
    SettingsTable,
    iter_leaves,
    strip_sources,
)

_VALUE_TYPE_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number with a fraction",
    str: "text",
    list: "a list",
    dict: "a table",
    date: "a date or time",
    time: "a date or time",
}
_TYPE_ERROR_SUFFIXES = ("_type", "_from_float", "_parsing")
_CUSTOM_MESSAGE_ERRORS = ("value_error", "assertion_error")
_MISSING = object()

NESTED_TOO_DEEPLY = "lists or tables nested too deeply; no setting needs that"


@dataclass(frozen=True, slots=True)
class _ValidationProblem:
    """One validation error, located at the key that the user wrote."""

    type: str
    config_key: ConfigKey
    value: object
    setting_source: str
    reason: str

    @property
    def key(self) -> str:
        return dotted_key(self.config_key.path)


def format_validation_errors(
    model: type[Config],
    table: SettingsTable,
    errors: Sequence[ErrorDetails],
    source: str,
    unset_keys: Collection[tuple[str, ...]] = (),
) -> str:
    """Return one message for all ``errors`` of validating ``table``.

    Args:
        model: The class that was validated.
        table: The settings that were validated.
        errors: The errors of pydantic.
        source: The source that messages about missing keys name: the run file.
        unset_keys: Keys that an override unset; messages about them name the override.
    """
    by_key: dict[tuple[str, ...], str] = {}
    for error in errors:
        problem = _locate_problem(model, table, error, source)
        if problem.type == "missing" and problem.config_key.path in unset_keys:
            problem = replace(problem, setting_source=SOURCE_OVERRIDE)
        # A union reports an error for each of its members; only the first one is shown.
        by_key.setdefault(problem.config_key.path, escape_unprintable(_problem_message(problem)))
    return join_problems(list(by_key.values()))


def _locate_problem(
    model: type[Config], table: SettingsTable, error: ErrorDetails, source: str
) -> _ValidationProblem:
    config_key = locate_key(model, strip_sources(table), error["loc"])
    value: object = strip_sources(table)
    for key in config_key.path:
        if isinstance(value, list):
            value = value[int(key)]
        else:
            value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
    cause = error.get("ctx", {}).get("error")
    reason = str(cause) if isinstance(cause, Exception) else error["msg"]
    return _ValidationProblem(
        error["type"], config_key, value, _sources_under(table, config_key.path) or source, reason
    )


def _sources_under(table: SettingsTable, path: tuple[str, ...]) -> str:
    leaf_sources = [leaf.source for at, leaf in iter_leaves(table) if at[: len(path)] == path]
    set_by_user = [source for source in leaf_sources if source != SOURCE_DEFAULT]
    return " and ".join(dict.fromkeys(set_by_user or leaf_sources))


def _problem_message(problem: _ValidationProblem) -> str:
    if problem.type == "json_invalid":
        return f"{problem.setting_source}: {NESTED_TOO_DEEPLY}"
    if problem.type in ("union_tag_invalid", "union_tag_not_found"):
        return _unknown_kind_message(problem)
    if problem.type == "extra_forbidden":
        return _unknown_key_message(problem)
    if problem.type == "missing":
        return _missing_key_message(problem)
    if (
        problem.type in _CUSTOM_MESSAGE_ERRORS
        or problem.config_key.expected_type is None
        or not problem.key
    ):
        return f"{_setting_text(problem)}: {problem.reason}"
    return _invalid_value_message(problem)


def _missing_key_message(problem: _ValidationProblem) -> str:
    expected_type = describe_expected(problem.config_key.expected_type, problem.config_key.limits)
    if problem.setting_source != SOURCE_OVERRIDE:
        return f"{problem.setting_source}: {problem.key} is missing; expected {expected_type}"
    quoted = (
        f"; to mean empty text, quote it: {problem.key}='\"\"'" if "text" in expected_type else ""
    )
    return (
        f"{problem.setting_source}: {problem.key}= unsets a key without a default; "
        f"expected {expected_type}{quoted}"
    )


def _unknown_kind_message(problem: _ValidationProblem) -> str:
    kinds = [
        kind
        for table in table_classes(problem.config_key.expected_type)
        for kind in kind_values(table)
    ]
    key = dotted_key((*problem.config_key.path, "kind"))
    value = problem.value.get("kind", _MISSING) if isinstance(problem.value, dict) else _MISSING
    if value is _MISSING:
        return f"{problem.setting_source}: {key} is missing; expected one of: {', '.join(kinds)}"
    names = suggest_known_name(str(value), kinds, "known kinds")
    return f"{problem.setting_source}: {key} = {shorten_value(value)}: unknown kind{names}"


def _unknown_key_message(problem: _ValidationProblem) -> str:
    *parents, name = problem.config_key.path
    owner = problem.config_key.owner
    known_keys = list(owner.model_fields) if owner else []
    names = suggest_known_name(
        name, known_keys, f"known in {dotted_key(parents)}" if parents else "known"
    )
    if isinstance(problem.value, dict):
        return f"{_first_nested_setting(problem)}: unknown table {shorten_value(name)}{names}"
    return f"{_setting_text(problem)}: unknown key{names}"


def _invalid_value_message(problem: _ValidationProblem) -> str:
    expected_type, value = problem.config_key.expected_type, problem.value
    expected_text = describe_expected(expected_type, problem.config_key.limits)
    if isinstance(value, dict) and expected_text != "a table":
        return _not_a_table_message(problem, expected_text)
    if problem.type == "finite_number":
        return f"{_setting_text(problem)}: expected a finite number"
    got = f"; got {_value_type_name(value)}" if problem.type.endswith(_TYPE_ERROR_SUFFIXES) else ""
    if (
        got
        and "text" in expected_text
        and problem.setting_source == SOURCE_OVERRIDE
        and isinstance(value, int | float)
    ):
        got += f"; to mean text, quote it: {problem.key}='\"{value}\"'"
    guess = did_you_mean(value, allowed_values(expected_type)) if isinstance(value, str) else ""
    kinds = [kind for table in table_classes(expected_type) for kind in kind_values(table)]
    if isinstance(value, str) and value in kinds:
        guess = f"; did you mean {problem.key}.kind = {shorten_value(value)}?"
    return f"{_setting_text(problem)}: expected {expected_text}{got}{guess}"


def _not_a_table_message(problem: _ValidationProblem, expected_text: str) -> str:
    items = (
        "; give it whole, or name an item it has, from 0"
        if expected_text.startswith("a list")
        else ""
    )
    setting = _first_nested_setting(problem)
    return f"{setting}: {problem.key} is not a table; expected {expected_text}{items}"


def _first_nested_setting(problem: _ValidationProblem) -> str:
    """Return source, key and value of the first setting inside an unexpected table."""
    path, inner = problem.config_key.path, problem.value
    while isinstance(inner, dict) and inner:
        key, inner = next(iter(inner.items()))
        path = (*path, key)
    return f"{problem.setting_source}: {dotted_key(path)} = {shorten_value(inner)}"


def _setting_text(problem: _ValidationProblem) -> str:
    if not problem.key:
        return problem.setting_source
    if isinstance(problem.value, dict) or problem.value is _MISSING:
        return f"{problem.setting_source}: {problem.key}"
    return f"{problem.setting_source}: {problem.key} = {shorten_value(problem.value)}"


def _value_type_name(value: object) -> str:
    return next(
        (name for kind, name in _VALUE_TYPE_NAMES.items() if isinstance(value, kind)), "nothing"
    )

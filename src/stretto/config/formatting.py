"""Format keys, values and names for messages and run files: as TOML, on one printable line."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from difflib import get_close_matches

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_MAX_VALUE_CHARS = 80
_ESCAPES: Mapping[str, str] = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def toml_value(value: object) -> str:
    """Return ``value`` as TOML on one line; keys whose value is None are omitted."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(_escape_char(char) for char in value) + '"'
    if isinstance(value, Mapping):
        items = (f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None)
        return "{" + ", ".join(items) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return value.isoformat() if isinstance(value, date | time) else repr(value)


def toml_key(key: str) -> str:
    """Return ``key`` bare where TOML allows it, else quoted."""
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)


def dotted_key(path: Iterable[str]) -> str:
    """Return ``path`` as a dotted key, quoted where TOML needs it."""
    return ".".join(toml_key(key) for key in path)


def shorten_value(value: object) -> str:
    """Return ``value`` as TOML for a message, truncated to 80 characters."""
    text = toml_value(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def escape_unprintable(text: str) -> str:
    """Return ``text`` with unprintable characters escaped, so that it is one safe line."""
    return "".join(char if char.isprintable() else _escape_char(char) for char in text)


def suggest_known_name(name: str, known_names: Sequence[str], label: str) -> str:
    """Return a hint with the most similar known name, if any, and the list of all names."""
    names = ", ".join(known_names) or "none"
    hint = did_you_mean(name, known_names)
    return f"{hint} {label}: {names}" if hint else f"; {label}: {names}"


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    """Return ``; did you mean "x"?`` with the most similar known name, or an empty text."""
    by_lower = {candidate.lower(): candidate for candidate in known_names}
    match = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {shorten_value(by_lower[match[0]])}?" if match else ""


def join_problems(problems: Sequence[str]) -> str:
    """Return one message for all ``problems``, with a line for each if there are several."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{len(problems)} problems in the configuration:", *problems])


def _escape_char(char: str) -> str:
    if char in _ESCAPES or char.isprintable():
        return _ESCAPES.get(char, char)
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"

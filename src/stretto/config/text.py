"""How keys, values and names are written: as TOML, on one line, with nothing unprintable."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from difflib import get_close_matches

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN_CHARS = 80
_ESCAPES: Mapping[str, str] = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def toml_value(value: object) -> str:
    """Return ``value`` as TOML on one line; keys without a value (None) are left out of tables."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(_escaped(char) for char in value) + '"'
    if isinstance(value, Mapping):
        items = (f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None)
        return "{" + ", ".join(items) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return value.isoformat() if isinstance(value, date | time) else repr(value)


def toml_key(key: str) -> str:
    """Return ``key`` bare where TOML allows it, else quoted."""
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)


def dotted(path: Iterable[str]) -> str:
    """Return ``path`` as one key, as a user would write it."""
    return ".".join(toml_key(key) for key in path)


def shown(value: object) -> str:
    """Return ``value`` for a message, cut where it is long."""
    text = toml_value(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, so that it stays one harmless line."""
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def suggestion(name: str, known: Sequence[str], label: str) -> str:
    """Return the known name most like ``name``, if any is, and the list of all, with ``label``."""
    names = ", ".join(known) or "none"
    guess = nearest(name, known)
    return f"{guess} {label}: {names}" if guess else f"; {label}: {names}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean "x"?`` for the known name most like ``name``, or nothing."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    match = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean {shown(by_lower[match[0]])}?" if match else ""


def listed(problems: Sequence[str]) -> str:
    """Return one message for all ``problems``, a line each where there are several."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{len(problems)} problems in the configuration:", *problems])


def _escaped(char: str) -> str:
    if char in _ESCAPES or char.isprintable():
        return _ESCAPES.get(char, char)
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"

"""Parse sizes and rates such as "25MB" and "400mbit", and format bytes and seconds."""

import re
from typing import Annotated

from pydantic import BeforeValidator

from stretto.errors import ConfigError

_BYTES_PER_UNIT = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_BITS_PER_S_PER_UNIT = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Return bytes: ``"2MB"`` is 2,000,000, ``"2MiB"`` is 2,097,152, ``"7"`` is 7."""
    return _parse_quantity(text, _BYTES_PER_UNIT, "b", 'a size such as "2MB" or "512KiB"')


def parse_bits_per_s(text: str | int) -> int:
    """Return bits per second: ``"400mbit"`` is 400,000,000."""
    return _parse_quantity(
        text, _BITS_PER_S_PER_UNIT, "bit", 'a rate such as "400mbit" or "10gbit"'
    )


def parse_fraction(text: str) -> float:
    """Return a fraction in [0, 1): ``"0.1%"`` and ``"0.001"`` are both 0.001."""
    number = text.strip()
    try:
        value = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ConfigError(f'expected a fraction such as "0.1%" or "0.001", got {text!r}')
    return value


def format_bytes(num_bytes: float) -> str:
    """Return ``num_bytes`` with the largest decimal unit that keeps it at least one."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if abs(num_bytes) >= 0.9995 * scale:  # three digits round it up to 1 of this unit
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def format_s(seconds: float) -> str:
    """Return a duration as text: ``0.7 ms``, ``1.25 s``, ``3 min 20 s``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _parse_quantity(
    text: str | int, scales: dict[str, int], default_unit: str, expected: str
) -> int:
    match = _QUANTITY.fullmatch(str(text))
    scale = scales.get((match.group(2) or default_unit).lower()) if match else None
    if match is None or scale is None or isinstance(text, bool):
        raise ConfigError(f"expected {expected}, got {text!r}")
    return round(float(match.group(1)) * scale)


def _validate_num_bytes(value: object) -> object:
    if not isinstance(value, (str, int)):
        raise ValueError(f'expected a size such as "2MB" or a number of bytes, got {value!r}')  # noqa: TRY004 - pydantic turns ValueError into a located message
    try:
        return parse_bytes(value)
    except ConfigError as wrong:
        raise ValueError(str(wrong)) from None


Bytes = Annotated[int, BeforeValidator(_validate_num_bytes)]
"""A config field that takes ``"2MB"`` as well as a number of bytes."""

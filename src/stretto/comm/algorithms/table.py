"""Which algorithm carries a message of which size, written as people say it.

``"ring"`` is the ring for everything; ``"native, ring from 8MB"`` changes over at 8 MB.
"""

import difflib
from dataclasses import dataclass

from stretto.comm.algorithms import ALLREDUCE
from stretto.comm.schedule import Schedule
from stretto.errors import ConfigError
from stretto.units import parse_bytes


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """Rows of (smallest message, algorithm), the first from zero on, sizes growing."""

    rows: tuple[tuple[int, str], ...]

    def pick(self, num_bytes: int, size: int) -> Schedule:
        """Return the schedule for a message of ``num_bytes`` among ``size`` ranks."""
        name = next(name for least, name in reversed(self.rows) if num_bytes >= least)
        return ALLREDUCE[name](size)


def parse_table(text: str) -> AlgorithmTable:
    """Read ``"NAME, NAME from SIZE, ..."``; raise `ConfigError` saying what is wrong."""
    rows: list[tuple[int, str]] = []
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition(" from "))
        if name not in ALLREDUCE:
            near = difflib.get_close_matches(name, ALLREDUCE, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ";"
            raise ConfigError(f"no algorithm {name!r}{hint} known: {', '.join(ALLREDUCE)}")
        least = parse_bytes(size) if size else 0
        if bool(rows) != bool(size) or (rows and least <= rows[-1][0]):
            raise ConfigError(
                f'{text!r}: write "NAME" or "NAME, NAME from SIZE", sizes growing to the right'
            )
        rows.append((least, name))
    return AlgorithmTable(tuple(rows))

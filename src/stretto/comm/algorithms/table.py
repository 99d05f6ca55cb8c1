"""Which algorithm carries a message of which size, written as people say it.

``"ring"`` is the ring for everything; ``"doubling, hierarchical/8 from 1MB"`` changes over at 1 MB
to the hierarchical one, its tensor cut into 8 parts that follow each other.
"""

from collections.abc import Collection
from dataclasses import dataclass

from stretto.cluster.world import Mesh
from stretto.comm.algorithms import ALLREDUCE
from stretto.comm.schedule import Schedule
from stretto.config.text import suggestion
from stretto.errors import ConfigError
from stretto.units import parse_bytes

MAX_PARTS = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """One row: from ``least`` bytes on, this algorithm in so many parts."""

    least: int
    name: str
    parts: int = 1

    @property
    def word(self) -> str:
        """Return the algorithm as it is written in a table."""
        return word_of(self.name, self.parts)

    def schedule(self, mesh: Mesh) -> Schedule:
        """Return its schedule on ``mesh``."""
        return ALLREDUCE[self.name](mesh, self.parts)


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """Choices with growing sizes, the first from zero on."""

    choices: tuple[Choice, ...]

    def pick(self, num_bytes: int) -> Choice:
        """Return the choice for a message of ``num_bytes``."""
        return next(choice for choice in reversed(self.choices) if num_bytes >= choice.least)

    def __str__(self) -> str:
        first, *others = self.choices
        return ", ".join([first.word, *(f"{c.word} from {_exactly(c.least)}" for c in others)])


def _exactly(num_bytes: int) -> str:
    """Return a size that reads back as the same number."""
    for unit, scale in (("MB", 10**6), ("KB", 10**3)):
        if num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    return str(num_bytes)


def parse_table(text: str) -> AlgorithmTable:
    """Read ``"NAME, NAME/PARTS from SIZE, ..."``; raise `ConfigError` saying what is wrong."""
    choices: list[Choice] = []
    for part in text.split(","):
        word, _, size = (word.strip() for word in part.partition(" from "))
        least = parse_bytes(size) if size else 0
        if bool(choices) != bool(size) or (choices and least <= choices[-1].least):
            raise ConfigError(
                f'{text!r}: write "NAME" or "NAME, NAME from SIZE", sizes growing to the right'
            )
        choices.append(Choice(least, *parse_word(word)))
    return AlgorithmTable(tuple(choices))


def word_of(name: str, parts: int) -> str:
    """Return the word that `parse_word` reads."""
    return name if parts == 1 else f"{name}/{parts}"


def parse_word(word: str, known: Collection[str] = ALLREDUCE.keys()) -> tuple[str, int]:
    """Read ``"NAME"`` or ``"NAME/PARTS"``; raise `ConfigError` saying what is wrong."""
    name, slash, parts = word.partition("/")
    if name not in known:
        raise ConfigError(f"no algorithm {name!r}{suggestion(name, list(known), 'known')}")
    if slash and not (parts.isdecimal() and 1 <= int(parts) <= MAX_PARTS):
        raise ConfigError(f"{word!r}: parts are a number from 1 to {MAX_PARTS}, as in {name}/8")
    return name, int(parts or 1)

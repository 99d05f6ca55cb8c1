"""The all-reduce algorithm for each message size, as written in run files.

``"ring"`` is the ring for every size. ``"doubling, hierarchical/8 from 1MB"`` is recursive doubling
below 1 MB, and above it the hierarchical algorithm with the tensor cut into 8 pipelined parts.
"""

from collections.abc import Collection
from dataclasses import dataclass

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALLREDUCE
from stretto.collectives.schedule import Schedule
from stretto.config.formatting import suggest_known_name
from stretto.errors import ConfigError
from stretto.units import parse_bytes

MAX_PARTS = 256


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """One entry: the algorithm ``name`` in ``parts`` parts, from ``min_bytes`` bytes on."""

    min_bytes: int
    name: str
    parts: int = 1

    @property
    def word(self) -> str:
        """The algorithm as written in a table, such as ``"ring/2"``."""
        return algorithm_text(self.name, self.parts)

    def schedule(self, mesh: Mesh) -> Schedule:
        """Return the schedule of the algorithm on ``mesh``."""
        return ALLREDUCE[self.name](mesh, self.parts)


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """Choices in order of growing size; the first one begins at 0 bytes."""

    choices: tuple[AlgorithmChoice, ...]

    def pick(self, num_bytes: int) -> AlgorithmChoice:
        """Return the choice for a message of ``num_bytes``."""
        return next(choice for choice in reversed(self.choices) if num_bytes >= choice.min_bytes)

    def __str__(self) -> str:
        first, *others = self.choices
        return ", ".join(
            [first.word, *(f"{c.word} from {_exact_size_text(c.min_bytes)}" for c in others)]
        )


def _exact_size_text(num_bytes: int) -> str:
    """Return a size as text that `parse_bytes` reads as the same number."""
    for unit, scale in (("MB", 10**6), ("KB", 10**3)):
        if num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    return str(num_bytes)


def parse_table(text: str) -> AlgorithmTable:
    """Read ``"NAME, NAME/PARTS from SIZE, ..."``; raise `ConfigError` if it cannot be read."""
    choices: list[AlgorithmChoice] = []
    for part in text.split(","):
        word, _, size = (word.strip() for word in part.partition(" from "))
        min_bytes = parse_bytes(size) if size else 0
        if bool(choices) != bool(size) or (choices and min_bytes <= choices[-1].min_bytes):
            raise ConfigError(
                f'{text!r}: write "NAME" or "NAME, NAME from SIZE", sizes growing to the right'
            )
        choices.append(AlgorithmChoice(min_bytes, *parse_algorithm(word)))
    return AlgorithmTable(tuple(choices))


def algorithm_text(name: str, parts: int) -> str:
    """Return the text that `parse_algorithm` reads."""
    return name if parts == 1 else f"{name}/{parts}"


def parse_algorithm(word: str, names: Collection[str] = ALLREDUCE.keys()) -> tuple[str, int]:
    """Read ``"NAME"`` or ``"NAME/PARTS"``; raise `ConfigError` if ``names`` has no such name."""
    name, slash, parts = word.partition("/")
    if name not in names:
        raise ConfigError(f"no algorithm {name!r}{suggest_known_name(name, list(names), 'known')}")
    if slash and not (parts.isdecimal() and 1 <= int(parts) <= MAX_PARTS):
        raise ConfigError(f"{word!r}: parts are a number from 1 to {MAX_PARTS}, as in {name}/8")
    return name, int(parts or 1)

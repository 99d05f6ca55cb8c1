"""What a recipe is: tables of settings, as a run file would hold them, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Tables = Mapping[str, Mapping[str, object]]
"""Laid over the defaults and under a run file by `stretto.config.load`."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A published run; every setting that matters names its source."""

    name: str
    title: str
    tables: Tables
    sources: Mapping[str, str] = field(default_factory=dict)
    """By dotted key: who says so; "reconstructed" where nobody does, with the reason."""
    samples: int = 0
    """Training samples of the data it was made for."""
    based_on: str = ""
    """The recipe it was derived from."""


def derived(
    base: Recipe, name: str, title: str, tables: Tables, sources: Mapping[str, str]
) -> Recipe:
    """Return ``base`` with other settings; a table of another kind starts anew.

    What is taken over keeps its source.
    """
    joined = {key: dict(table) for key, table in base.tables.items()}
    kept = dict(base.sources)
    for key, table in tables.items():
        before = joined.get(key, {})
        if table.get("kind", before.get("kind")) != before.get("kind"):
            before = {}
            kept = {path: told for path, told in kept.items() if not path.startswith(f"{key}.")}
        joined[key] = {**before, **table}
    return Recipe(name, title, joined, {**kept, **sources}, base.samples, base.name)

"""A loaded config as a run file again: complete, and every line says who set it."""

from collections.abc import Iterator

from stretto.config.load import C, Loaded, tree_of
from stretto.config.text import dotted, printable, toml_key, toml_value
from stretto.config.tree import Table, Tree, Value


def to_toml(loaded: Loaded[C]) -> str:
    """Return a run file that `load` reads back to an equal config.

    TOML has no word for nothing: a field that is None becomes a comment line, and comes back as
    None where that is its default.
    """
    return "\n".join(_lines((), tree_of(loaded))).lstrip("\n") + "\n"


def _lines(header: tuple[str, ...], table: Table) -> Iterator[str]:
    """Yield the settings of ``table``, then its sub-tables: TOML wants them in this order."""
    for key, item in table.items():
        if isinstance(item, Value):
            yield _setting(toml_key(key), item)
    for key, item in table.items():
        yield from _sub_tables((*header, key), item)


def _setting(key: str, leaf: Value) -> str:
    if leaf.content is None:
        return f"# {key}: not set"
    return f"{key} = {toml_value(leaf.content)}  # {printable(leaf.origin)}"


def _sub_tables(header: tuple[str, ...], item: Tree) -> Iterator[str]:
    if isinstance(item, dict):
        yield from ("", f"[{dotted(header)}]", *_lines(header, item))
    elif isinstance(item, list):
        for row in item:
            if isinstance(row, dict):
                yield from ("", f"[[{dotted(header)}]]", *_lines(header, row))

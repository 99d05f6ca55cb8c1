"""Settings before they are checked: nested tables whose every leaf remembers where it came from."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stretto.config.shape import Config, choose, tables_of
from stretto.config.text import dotted

DEFAULT = "default"
"""The origin of what nobody set."""

RECIPE = "recipe"
"""The origin of what a ready-made run set."""

OVERRIDE = "override"
"""The origin of what the command line set."""


@dataclass(frozen=True, slots=True)
class Value:
    """A leaf: text, number, list of those, or an empty table; and who set it."""

    content: object
    origin: str


Tree: TypeAlias = "dict[str, Tree] | list[Tree] | Value"
Table: TypeAlias = dict[str, Tree]


def mark(content: object, origin: str) -> Tree:
    """Return ``content`` as a tree whose leaves all come from ``origin``."""
    if isinstance(content, dict) and content:
        return mark_table(content, origin)
    if isinstance(content, list) and content and all(isinstance(item, dict) for item in content):
        return [mark_table(item, origin) for item in content]
    return Value(content, origin)


def mark_table(content: Mapping[str, object], origin: str) -> Table:
    """Return a table that may be empty, its leaves marked with ``origin``."""
    return {key: mark(item, origin) for key, item in content.items()}


def plain(tree: Tree) -> object:
    """Return the contents without their origins."""
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [plain(item) for item in tree]
    return tree.content


def with_origins(table: Table, origins: Mapping[str, str], path: tuple[str, ...] = ()) -> Table:
    """Return ``table`` with every leaf's origin looked up by its dotted key."""
    return {key: _with_origins(item, origins, (*path, key)) for key, item in table.items()}


def leaves(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Yield every leaf with its path, in the order of the tree; list items count from 0."""
    if isinstance(tree, Value):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, item in items:
        yield from leaves(item, (*path, str(key)))


def nest(path: Iterable[str], tree: Tree) -> Tree:
    """Return ``tree`` hung under the keys of ``path``."""
    for key in reversed(tuple(path)):
        tree = {key: tree}
    return tree


def layer(below: Tree, above: Tree) -> Tree:
    """Return ``above`` laid over ``below``: tables merge key by key, anything else replaces.

    A table of another ``kind`` is another table: then nothing of the one below shows through.
    """
    if isinstance(below, list) and isinstance(above, dict):
        return _layer_items(below, above)
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if "kind" in above and kind_of(below) not in (None, kind_of(above)):
        return above
    return below | {k: layer(below[k], v) if k in below else v for k, v in above.items()}


def layer_table(below: Table, above: Tree) -> Table:
    """Return ``above``, a table too, laid over ``below``."""
    whole = layer(below, above)
    assert isinstance(whole, dict), "two tables make a table"
    return whole


def without(tree: Tree, path: Sequence[str]) -> Tree:
    """Return ``tree`` without the key ``path``; the items of a list cannot be taken out."""
    name, *rest = path
    if isinstance(tree, list) and rest and name.isdecimal() and int(name) < len(tree):
        items = list(tree)
        items[int(name)] = without(items[int(name)], rest)
        return items
    if not isinstance(tree, dict) or name not in tree:
        return tree
    if not rest:
        return {key: item for key, item in tree.items() if key != name}
    return tree | {name: without(tree[name], rest)}


def take_back(model: type[Config], table: Table, path: tuple[str, ...]) -> Table:
    """Return ``table`` as if nobody had set ``path``.

    A table whose kind is another one then starts anew, as it does when its kind is changed.
    """
    rest = without(table, path)
    assert isinstance(rest, dict), "a table without a key is a table"
    if path[-1] != "kind" or len(path) == 1:
        return rest
    before, after = (
        {p: leaf.content for p, leaf in leaves(t)} for t in (table, complete(model, rest))
    )
    return rest if before.get(path) == after.get(path) else take_back(model, table, path[:-1])


def complete(model: type[Config], table: Table) -> Table:
    """Return ``table`` with what its sub-tables inherit from the defaults of their fields.

    A sub-table without ``kind`` takes the default's kind, and one of the default's kind takes
    the keys it does not set itself. Absent fields stay absent.
    """
    whole = dict(table)
    for name, field in model.model_fields.items():
        if name not in table or not (tables := tables_of(field.annotation)):
            continue
        given, default = table[name], field.get_default(call_default_factory=True)
        if isinstance(given, Value) and given.content == {}:
            given = {}
        if isinstance(given, dict):
            given = layer(_defaults(default), given)
        whole[name] = _complete_one(tables, given)
    return whole


def kind_of(table: Table) -> object:
    """Return the ``kind`` that ``table`` gives, or None."""
    kind = table.get("kind")
    return kind.content if isinstance(kind, Value) else None


def _with_origins(tree: Tree, origins: Mapping[str, str], path: tuple[str, ...]) -> Tree:
    if isinstance(tree, dict):
        return with_origins(tree, origins, path)
    if isinstance(tree, list):
        return [_with_origins(item, origins, (*path, str(i))) for i, item in enumerate(tree)]
    return Value(tree.content, origins.get(dotted(path), DEFAULT))


def _complete_one(tables: tuple[type[Config], ...], given: Tree) -> Tree:
    if isinstance(given, list):
        return [_complete_one(tables, item) for item in given]
    chosen = choose(tables, kind_of(given)) if isinstance(given, dict) else None
    return complete(chosen, given) if chosen and isinstance(given, dict) else given


def _defaults(default: object) -> Tree:
    if isinstance(default, Config):
        return mark_table(default.model_dump(mode="json"), DEFAULT)
    if isinstance(default, tuple | list):
        dumped = [item.model_dump(mode="json") for item in default if isinstance(item, Config)]
        return mark(dumped, DEFAULT)
    return {}


def _layer_items(below: list[Tree], above: Table) -> Tree:
    """Lay the items that ``above`` names by number over those of the list."""
    if not all(key.isdecimal() and int(key) < len(below) for key in above):
        return above
    items = list(below)
    for key, item in above.items():
        items[int(key)] = layer(items[int(key)], item)
    return items

"""Settings before validation: nested tables in which every leaf has a source."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stretto.config.formatting import dotted_key
from stretto.config.schema import Config, select_table_class, table_classes

SOURCE_DEFAULT = "default"
"""The source of values that nobody set."""

SOURCE_RECIPE = "recipe"
"""The source of values that a recipe set."""

SOURCE_OVERRIDE = "override"
"""The source of values that the command line set."""


@dataclass(frozen=True, slots=True)
class SettingValue:
    """A leaf of the tree: text, number, list of those, or an empty table; and its source."""

    content: object
    source: str


SettingsTree: TypeAlias = "dict[str, SettingsTree] | list[SettingsTree] | SettingValue"
SettingsTable: TypeAlias = dict[str, SettingsTree]


def build_tree(content: object, source: str) -> SettingsTree:
    """Return ``content`` as a tree whose leaves all come from ``source``."""
    if isinstance(content, dict) and content:
        return build_table(content, source)
    if isinstance(content, list) and content and all(isinstance(item, dict) for item in content):
        return [build_table(item, source) for item in content]
    return SettingValue(content, source)


def build_table(content: Mapping[str, object], source: str) -> SettingsTable:
    """Return a table, possibly empty, whose leaves all come from ``source``."""
    return {key: build_tree(item, source) for key, item in content.items()}


def strip_sources(tree: SettingsTree) -> object:
    """Return the contents without their sources."""
    if isinstance(tree, dict):
        return {key: strip_sources(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [strip_sources(item) for item in tree]
    return tree.content


def with_sources(
    table: SettingsTable, sources: Mapping[str, str], path: tuple[str, ...] = ()
) -> SettingsTable:
    """Return ``table`` with the source of every leaf looked up by its dotted key."""
    return {key: _tree_with_sources(item, sources, (*path, key)) for key, item in table.items()}


def iter_leaves(
    tree: SettingsTree, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], SettingValue]]:
    """Yield every leaf with its path, in tree order; list items are numbered from 0."""
    if isinstance(tree, SettingValue):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, item in items:
        yield from iter_leaves(item, (*path, str(key)))


def nest_under(path: Iterable[str], tree: SettingsTree) -> SettingsTree:
    """Return ``tree`` nested under the keys of ``path``."""
    for key in reversed(tuple(path)):
        tree = {key: tree}
    return tree


def merge_trees(base: SettingsTree, overlay: SettingsTree) -> SettingsTree:
    """Return ``base`` with ``overlay`` applied: tables merge key by key, other values replace.

    A table whose ``kind`` differs replaces the whole table of ``base``.
    """
    if isinstance(base, list) and isinstance(overlay, dict):
        return _merge_list_items(base, overlay)
    if not isinstance(base, dict) or not isinstance(overlay, dict):
        return overlay
    if "kind" in overlay and kind_of(base) not in (None, kind_of(overlay)):
        return overlay
    return base | {k: merge_trees(base[k], v) if k in base else v for k, v in overlay.items()}


def merge_tables(base: SettingsTable, overlay: SettingsTree) -> SettingsTable:
    """Return ``base`` with ``overlay``, also a table, applied."""
    merged = merge_trees(base, overlay)
    assert isinstance(merged, dict), "two tables make a table"
    return merged


def remove_key(tree: SettingsTree, path: Sequence[str]) -> SettingsTree:
    """Return ``tree`` without the key ``path``; list items cannot be removed."""
    name, *rest = path
    if isinstance(tree, list) and rest and name.isdecimal() and int(name) < len(tree):
        items = list(tree)
        items[int(name)] = remove_key(items[int(name)], rest)
        return items
    if not isinstance(tree, dict) or name not in tree:
        return tree
    if not rest:
        return {key: item for key, item in tree.items() if key != name}
    return tree | {name: remove_key(tree[name], rest)}


def unset_key(model: type[Config], table: SettingsTable, path: tuple[str, ...]) -> SettingsTable:
    """Return ``table`` as if nobody had set ``path``.

    If this changes the kind of a table, that table is removed, as when an override changes it.
    """
    rest = remove_key(table, path)
    assert isinstance(rest, dict), "a table without a key is a table"
    if path[-1] != "kind" or len(path) == 1:
        return rest
    before, after = (
        {p: leaf.content for p, leaf in iter_leaves(t)}
        for t in (table, fill_inherited_defaults(model, rest))
    )
    return rest if before.get(path) == after.get(path) else unset_key(model, table, path[:-1])


def fill_inherited_defaults(model: type[Config], table: SettingsTable) -> SettingsTable:
    """Return ``table`` with its sub-tables completed from the defaults of their fields.

    A sub-table without ``kind`` gets the default's kind. A sub-table of the default's kind gets
    the keys that it does not set. Sub-tables that are absent stay absent.
    """
    merged = dict(table)
    for name, field in model.model_fields.items():
        if name not in table or not (tables := table_classes(field.annotation)):
            continue
        given, default = table[name], field.get_default(call_default_factory=True)
        if isinstance(given, SettingValue) and given.content == {}:
            given = {}
        if isinstance(given, dict):
            given = merge_trees(_default_tree(default), given)
        merged[name] = _fill_sub_table(tables, given)
    return merged


def kind_of(table: SettingsTable) -> object:
    """Return the ``kind`` that ``table`` sets, or None."""
    kind = table.get("kind")
    return kind.content if isinstance(kind, SettingValue) else None


def _tree_with_sources(
    tree: SettingsTree, sources: Mapping[str, str], path: tuple[str, ...]
) -> SettingsTree:
    if isinstance(tree, dict):
        return with_sources(tree, sources, path)
    if isinstance(tree, list):
        return [_tree_with_sources(item, sources, (*path, str(i))) for i, item in enumerate(tree)]
    return SettingValue(tree.content, sources.get(dotted_key(path), SOURCE_DEFAULT))


def _fill_sub_table(tables: tuple[type[Config], ...], given: SettingsTree) -> SettingsTree:
    if isinstance(given, list):
        return [_fill_sub_table(tables, item) for item in given]
    chosen = select_table_class(tables, kind_of(given)) if isinstance(given, dict) else None
    return fill_inherited_defaults(chosen, given) if chosen and isinstance(given, dict) else given


def _default_tree(default: object) -> SettingsTree:
    if isinstance(default, Config):
        return build_table(default.model_dump(mode="json"), SOURCE_DEFAULT)
    if isinstance(default, tuple | list):
        dumped = [item.model_dump(mode="json") for item in default if isinstance(item, Config)]
        return build_tree(dumped, SOURCE_DEFAULT)
    return {}


def _merge_list_items(base: list[SettingsTree], overlay: SettingsTable) -> SettingsTree:
    """Merge the items that ``overlay`` names by index into the list ``base``."""
    if not all(key.isdecimal() and int(key) < len(base) for key in overlay):
        return overlay
    items = list(base)
    for key, item in overlay.items():
        items[int(key)] = merge_trees(items[int(key)], item)
    return items

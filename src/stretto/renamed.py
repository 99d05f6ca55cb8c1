"""Names that have changed and still work: old spellings are read, and a warning names the new ones.

This is the one place that knows old names. A name stays here for as long as files that were
written with it may be around.
"""

import warnings
from collections.abc import Mapping

from stretto.errors import ConfigError

SETTINGS: Mapping[str, str] = {
    "strategy.fusion": "strategy.bucket_bytes",
    "strategy.cuts": "strategy.bucket_lengths",
    "run.silence_s": "run.heartbeat_timeout_s",
    "data.bad_limit": "data.max_corrupt_files",
    "init.fresh": "init.newly_initialised",
    "strategy.pending": "strategy.reduce_slots",
}
"""Keys of run files and overrides, as ``table.key``."""

EVENT_FIELDS: Mapping[str, str] = {
    "apart": "consensus_distance",
    "own_loss": "local_loss",
    "own_accuracy": "local_accuracy",
}
"""Fields of events in ``events.jsonl`` and of runs in a study's ``runs.jsonl``."""

MESSAGE_KINDS: Mapping[str, str] = {
    "gather": "unshard",
    "regather": "unshard_for_backward",
}
"""Words of the messages in a plan file."""

JSON_KEYS: Mapping[str, str] = {
    "budget": "memory_limit",
    "told_s": "predicted_s",
    "told_bytes": "predicted_bytes",
}
"""Keys of what `stretto plan --json` and `stretto bench plans` write, and of their records."""

PROFILE_KEYS: Mapping[str, str] = {
    "parting": "no_barrier_slowdown",
    "straying": "reordering_slowdown",
    "straying_met": "reordering_slowdown_with_barrier",
    "holes": "allocator_overhead",
}
"""Keys of profile files."""

FUNCTIONS: Mapping[str, str] = {"settle": "consolidate"}
"""Functions of the package ``stretto``."""


class RenamedWarning(FutureWarning):
    """Something was called by a name that has changed."""


def warn_renamed(old: str, new: str, where: str) -> None:
    """Warn that ``old``, found in ``where``, is called ``new`` now."""
    text = f"{where}: {old} is now called {new}; the old name still works: please change it"
    warnings.warn(text, RenamedWarning, stacklevel=3)


def with_new_keys(tables: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the tables of a run file with renamed keys under their new names.

    Raises:
        ConfigError: A key is there under both of its names.
    """
    result = dict(tables)
    for old, new in SETTINGS.items():
        table_name, old_key = old.split(".")
        table = result.get(table_name)
        if not isinstance(table, Mapping) or old_key not in table:
            continue
        new_key = new.split(".")[1]
        if new_key in table:
            raise ConfigError(
                f"{where}: {old} and {new} are both set, and are one setting: leave {old} out"
            )
        warn_renamed(old, new, where)
        # Each key keeps its place, so that the resolved run file keeps the order of this one.
        result[table_name] = {
            new_key if key == old_key else key: value for key, value in table.items()
        }
    return result


def with_new_path(path: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return the path of an override under its new name."""
    old = ".".join(path)
    if old not in SETTINGS:
        return path
    warn_renamed(old, SETTINGS[old], where)
    return tuple(SETTINGS[old].split("."))


def with_new_fields(record: Mapping[str, object]) -> dict[str, object]:
    """Return a record of an event or of a study's run with its fields under their new names.

    Nobody is warned: such files are written by programs, and reading an old one is no mistake.
    """
    return {EVENT_FIELDS.get(name, name): value for name, value in record.items()}


def with_new_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of a stored study, by dotted key, under their new names."""
    return {SETTINGS.get(key, key): value for key, value in settings.items()}


def with_old_keys(record: Mapping[str, object]) -> dict[str, object]:
    """Return a JSON record with its values also under the keys that they had before.

    Programs that read such records find either name. Nobody is warned, because output that a
    program reads has no place for a warning.
    """
    old_keys = {old: record[new] for old, new in JSON_KEYS.items() if new in record}
    return {**record, **old_keys}

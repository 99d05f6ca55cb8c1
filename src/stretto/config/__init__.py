"""Turn run files and overrides into one frozen, validated config tree.

Each component defines its own `Config` class. This package loads configs (`load`), adds values
that are derived later (`set_derived_values`, `replace_table`), writes them as TOML (`to_toml`) and
explains errors.
"""

from stretto.config.load import LoadedConfig, load, replace_table, set_derived_values, to_toml
from stretto.config.schema import Config

__all__ = ["Config", "LoadedConfig", "load", "replace_table", "set_derived_values", "to_toml"]

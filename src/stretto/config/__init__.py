"""Run files and overrides turned into one frozen, checked tree; knows no component.

Each component keeps its `Config` class beside itself; this room only reads (`load`), fills in
what was worked out later (`resolve`), writes (`to_toml`) and explains mistakes.
"""

from stretto.config.load import Loaded, load, resolve
from stretto.config.shape import Config
from stretto.config.write import to_toml

__all__ = ["Config", "Loaded", "load", "resolve", "to_toml"]

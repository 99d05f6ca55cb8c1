"""Stretto: distributed training in which communication is data before it is action.

Names are imported when they are first used, so that ``import stretto`` alone needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.strategy.distribute import clip_norm_, distribute, settle, share_batches, world

_HOMES = {
    "clip_norm_": "stretto.strategy.distribute",
    "distribute": "stretto.strategy.distribute",
    "settle": "stretto.strategy.distribute",
    "share_batches": "stretto.strategy.distribute",
    "world": "stretto.strategy.distribute",
}

__all__ = ["clip_norm_", "distribute", "settle", "share_batches", "world"]


def __getattr__(name: str) -> object:
    """Import a public name from its home the first time it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

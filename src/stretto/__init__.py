"""Stretto: distributed training for PyTorch, with communication schedules as plain values.

Public names are imported on first use, so that ``import stretto`` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.strategies.distribute import (
        clip_norm_,
        consolidate,
        distribute,
        share_batches,
        world,
    )

_MODULE_OF = {
    "clip_norm_": "stretto.strategies.distribute",
    "distribute": "stretto.strategies.distribute",
    "consolidate": "stretto.strategies.distribute",
    "share_batches": "stretto.strategies.distribute",
    "world": "stretto.strategies.distribute",
}

__all__ = ["clip_norm_", "consolidate", "distribute", "share_batches", "world"]


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use."""
    if name == "settle":
        from stretto.renamed import warn_renamed

        warn_renamed("stretto.settle", "stretto.consolidate", "a Python program")
        name = "consolidate"
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)

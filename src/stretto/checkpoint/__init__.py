"""Durable state: a run written so that any crash, full disk or flipped bit is survived."""

from stretto.checkpoint.backbone import Backbone, load_backbone, save_backbone
from stretto.checkpoint.generation import current_generation, next_generation
from stretto.checkpoint.lookup import load_at
from stretto.checkpoint.optimizer_state import flatten_optimizer, restore_optimizer_
from stretto.checkpoint.reading import load_newest, load_one, verify
from stretto.checkpoint.state import Saved, State
from stretto.checkpoint.writing import save

__all__ = [
    "Backbone",
    "Saved",
    "State",
    "current_generation",
    "flatten_optimizer",
    "load_at",
    "load_backbone",
    "load_newest",
    "load_one",
    "next_generation",
    "restore_optimizer_",
    "save",
    "save_backbone",
    "verify",
]

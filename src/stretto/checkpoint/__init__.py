"""Checkpoints that survive crashes, full disks and flipped bits."""

from stretto.checkpoint.folders import current_generation, next_generation
from stretto.checkpoint.manifest import CheckpointState, SaveResult
from stretto.checkpoint.optimizer_state import flatten_optimizer, restore_optimizer_
from stretto.checkpoint.save_load import (
    find_and_load,
    load_checkpoint,
    load_newest,
    save_checkpoint,
    verify_checkpoint,
)
from stretto.checkpoint.tensor_files import Backbone, load_backbone, save_backbone

__all__ = [
    "Backbone",
    "CheckpointState",
    "SaveResult",
    "current_generation",
    "find_and_load",
    "flatten_optimizer",
    "load_backbone",
    "load_checkpoint",
    "load_newest",
    "next_generation",
    "restore_optimizer_",
    "save_backbone",
    "save_checkpoint",
    "verify_checkpoint",
]

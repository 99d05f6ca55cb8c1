"""The ``[train]`` table: how long, how much at once, how often to look."""

from typing import Literal

from pydantic import Field

from stretto.config import Config


class TrainConfig(Config):
    """Lengths are in optimizer steps unless they say otherwise."""

    batch: int = Field(default=64, ge=1)
    """Samples per step over all ranks together; the same at any number of ranks."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the training data; ``steps`` wins where both are set."""
    steps: int | None = Field(default=None, ge=1)
    """Length of the run in steps; counted from ``epochs`` when not set."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches each rank cuts its share of a step into, to save memory."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of forward and backward; weights and updates are always the model's own."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Gradients of a larger norm, over all parameters together, are scaled down to it."""
    log_every: int = Field(default=10, ge=1)
    """Steps between two lines of metrics."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between two evaluations; at the end of each epoch when not set."""
    save_every: int | None = Field(default=None, ge=1)
    """Steps between two checkpoints; at the end of each epoch when not set."""

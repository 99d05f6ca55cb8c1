"""The ``[train]`` table: how long, how much at once, how often to look."""

from typing import Literal

from pydantic import Field

from stretto.config import Config
from stretto.train.early_stop import EarlyStop


class TrainConfig(Config):
    """Lengths are in optimizer steps unless they say otherwise."""

    batch: int = Field(default=64, ge=1)
    """Samples per step over all ranks together; the same at any number of ranks."""
    epochs: int = Field(default=1, ge=1)
    """Length of the run in epochs; ``steps`` wins where both are set."""
    epoch_samples: int | None = Field(default=None, ge=1)
    """An epoch, for counting, evaluating and saving, is this many samples, rounded up to whole
    steps; one pass over the training data when not set. The order of samples does not depend on
    it."""
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
    early_stop: EarlyStop | None = None
    """When to end before the last step; never when not set."""

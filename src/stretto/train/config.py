"""The ``[train]`` table: length, batch sizes, precision, and intervals of logs and checkpoints."""

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.config import Config
from stretto.train.early_stop import EarlyStop
from stretto.train.precision import INIT_SCALE, Precision


class TrainConfig(Config):
    """The ``[train]`` table; lengths are in optimizer steps unless they say otherwise."""

    batch: int = Field(default=64, ge=1)
    """Samples per step over all ranks together (the global batch), at any number of ranks."""
    epochs: int = Field(default=1, ge=1)
    """Length of the run in epochs; ``steps`` has priority if both are set."""
    epoch_samples: int | None = Field(default=None, ge=1)
    """Samples in an epoch, rounded up to whole steps; one pass over the training data when not set.
    Epochs set the default intervals of evaluations and checkpoints. They do not affect the order
    of samples.
    """
    steps: int | None = Field(default=None, ge=1)
    """Length of the run in steps; computed from ``epochs`` when not set."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches into which each rank splits its samples of a step, to save memory."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Largest number of samples in a micro-batch; replaces ``accumulation``. Each rank uses as many
    micro-batches as its samples need. If it divides the samples per rank, batch norm sees
    batches of the same size at any number of ranks. A rank still loads all its samples of a step
    at once and prefetches the next two steps: it holds 3 x samples per rank x bytes per sample.
    """
    precision: Precision = "fp32"
    """Type of forward and backward; weights and updates keep the model's own type. "fp16" scales
    the loss, and skips a step whose gradients overflow.
    """
    loss_scale: float = Field(default=INIT_SCALE, ge=1)
    """Initial loss scale for fp16; it is halved by an overflow and doubled after 2,000 steps
    without one.
    """
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the target spread evenly over all classes; evaluation is never smoothed."""
    not_finite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a loss of any rank that is not finite; the step never changes the model. "stop":
    save, end the run and name the layer; "skip": skip the step; "rollback": go back to the
    newest checkpoint and skip that step on the way. "skip" and "rollback" also check gradients,
    so the update then waits for all of them.
    """
    not_finite_limit: int = Field(default=10, ge=0)
    """Skipped steps, not counting overflows of fp16, after which the run ends anyway."""
    statistics: Literal["average", "reestimate"] = "average"
    """Batch-norm statistics for evaluation: the mean of the ranks' running ones, or new ones
    computed from a few batches of training samples.
    """
    statistics_batches: int = Field(default=8, ge=1)
    """Batches per rank for statistics = "reestimate"."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest norm of the gradients of all parameters together; larger ones are scaled down to
    it.
    """
    log_every: int = Field(default=10, ge=1)
    """Steps between two log lines with metrics."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between two evaluations; at the end of each epoch when not set."""
    save_every: int | None = Field(default=None, ge=1)
    """Steps between two checkpoints; at the end of each epoch when not set."""
    early_stop: EarlyStop | None = None
    """Rule to end before the last step; never when not set."""

    @model_validator(mode="after")
    def _check_one_way_to_cut(self) -> Self:
        if self.micro_batch is not None and self.accumulation > 1:
            raise ValueError(
                f"accumulation = {self.accumulation} and micro_batch = {self.micro_batch} both set "
                "the number of micro-batches: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _refuse_ineffective_keys(self) -> Self:
        """Refuse keys that have no effect; written run files contain them with default values."""
        for key, read_by, is_read in (
            ("loss_scale", 'precision = "fp16"', self.precision == "fp16"),
            ("statistics_batches", 'statistics = "reestimate"', self.statistics == "reestimate"),
            ("not_finite_limit", 'not_finite = "skip" or "rollback"', self.not_finite != "stop"),
        ):
            if not is_read and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is read with {read_by} only: set that, or leave {key} out")
        return self

    def num_micro_batches(self, ranks: int) -> int:
        """Return the number of micro-batches per step, the same on each of ``ranks``.

        It does not depend on the samples a rank could read, because some strategies communicate in
        every micro-batch.
        """
        if self.micro_batch is None:
            return self.accumulation
        share = -(-self.batch // ranks)
        return -(-share // self.micro_batch)

    def micro_batch_sizes(self, num_samples: int, ranks: int) -> list[int]:
        """Return the samples in each micro-batch of a rank that has ``num_samples``.

        If a rank has fewer samples than others, its first micro-batches are empty and the others
        keep their size.
        """
        num_micro_batches = used = self.num_micro_batches(ranks)
        if self.micro_batch is not None:
            used = max(1, -(-num_samples // self.micro_batch))
        each, larger = divmod(num_samples, used)
        return [0] * (num_micro_batches - used) + [each + (index < larger) for index in range(used)]

    @property
    def reads_gradients(self) -> bool:
        """Whether complete gradients are read before the update."""
        needs_norm = self.clip_norm is not None or self.precision == "fp16"
        return needs_norm or self.not_finite != "stop"

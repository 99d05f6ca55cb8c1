"""The ``[train]`` table: how long, how much at once, how often to look."""

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.config import Config
from stretto.train.early_stop import EarlyStop
from stretto.train.precision import FIRST_SCALE, Precision


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
    micro_batch: int | None = Field(default=None, ge=1)
    """Samples of a micro-batch at most; as many micro-batches as the share needs, instead of
    ``accumulation``. Where it divides the shares, batch norm sees as many samples at any number of
    ranks. A share is loaded whole all the same, and the next two beside it: a rank holds
    3 x share x bytes of a sample."""
    precision: Precision = "fp32"
    """Type of forward and backward; weights and updates are always the model's own. "fp16" scales
    the loss, and leaves out a step that overflows."""
    loss_scale: float = Field(default=FIRST_SCALE, ge=1)
    """What fp16 multiplies the loss by at first; halved by an overflow, doubled after 2,000 good
    steps."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target spread evenly over all classes; evaluation is never smoothed."""
    not_finite: Literal["stop", "skip", "rollback"] = "stop"
    """What follows when the loss of any rank is not finite, before it changes the model. "stop":
    save and end, the layer named; "skip": leave the step out; "rollback": go back to the newest
    checkpoint, and leave that step out on the way. The last two judge gradients as well, which
    then are all waited for before the update."""
    not_finite_limit: int = Field(default=10, ge=0)
    """Steps left out, overflows of fp16 not counted, after which the run ends anyway."""
    statistics: Literal["average", "reestimate"] = "average"
    """What evaluation uses for batch statistics: the mean of the ranks' own running ones, or new
    ones from a few batches of training samples."""
    statistics_batches: int = Field(default=8, ge=1)
    """Batches of each rank for statistics = "reestimate"."""
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

    @model_validator(mode="after")
    def _one_way_to_cut(self) -> Self:
        if self.micro_batch is not None and self.accumulation > 1:
            raise ValueError(
                f"accumulation = {self.accumulation} and micro_batch = {self.micro_batch} both say "
                "how a share is cut: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        """Refuse what the chosen words do not read; run files written out hold the defaults."""
        for key, read_by, is_read in (
            ("loss_scale", 'precision = "fp16"', self.precision == "fp16"),
            ("statistics_batches", 'statistics = "reestimate"', self.statistics == "reestimate"),
            ("not_finite_limit", 'not_finite = "skip" or "rollback"', self.not_finite != "stop"),
        ):
            if not is_read and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is read with {read_by} only: set that, or leave {key} out")
        return self

    def pieces(self, ranks: int) -> int:
        """Return the micro-batches that each of ``ranks`` cuts its share of a step into.

        As many on all of them, whatever they could read: some strategies talk in each.
        """
        if self.micro_batch is None:
            return self.accumulation
        share = -(-self.batch // ranks)
        return -(-share // self.micro_batch)

    def piece_sizes(self, num_samples: int, ranks: int) -> list[int]:
        """Return the samples of each micro-batch of a rank that has ``num_samples``.

        Where a rank has fewer than the others, the first of its micro-batches are empty, and the
        rest are as large as they would be.
        """
        pieces = used = self.pieces(ranks)
        if self.micro_batch is not None:
            used = max(1, -(-num_samples // self.micro_batch))
        each, larger = divmod(num_samples, used)
        return [0] * (pieces - used) + [each + (piece < larger) for piece in range(used)]

    @property
    def reads_gradients(self) -> bool:
        """Whether whole gradients are looked at before the update."""
        looked_at = self.clip_norm is not None or self.precision == "fp16"
        return looked_at or self.not_finite != "stop"

"""The ``[optim]`` table of a run file: one class for each kind."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from stretto.config import Config
from stretto.errors import ConfigError
from stretto.optim.ratios import RatioDecay
from stretto.optim.rules import Momentum, Order

_BELONGS: dict[str, dict[str, tuple[str, ...]]] = {
    "warmup": {
        "warmup_steps": ("gradual", "constant"),
        "warmup_epochs": ("gradual", "constant"),
        "warmup_from": ("gradual", "constant"),
    },
    "decay": {
        "decay_epochs": ("step",),
        "decay_factor": ("step",),
        "decay_power": ("poly",),
        "decay_length": ("cosine", "poly"),
        "decay_floor": ("cosine", "poly"),
    },
}
"""By the key that chooses: which other keys mean something under which choice."""


class RateConfig(Config):
    """What every optimizer shares: the rate, how it follows the batch and the step, and decay.

    A key that the chosen warm-up or decay does not read may only hold its default.
    """

    lr: float = Field(default=0.1, gt=0)
    """Learning rate after warm-up; at ``reference_batch`` samples a step, where that is set."""
    reference_batch: int | None = Field(default=None, ge=1)
    """The batch ``lr`` was found at; another one derives another rate. Not set: ``lr`` is the rate
    itself."""
    scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate follows the batch, from ``reference_batch`` on."""
    for_batch: int | None = Field(default=None, ge=1)
    """Derive the rate for this batch instead of train.batch."""
    warmup: Literal["gradual", "constant", "none"] = "gradual"
    """Whether the rate grows with every step of the warm-up, or waits at a lower one."""
    warmup_steps: int = Field(default=0, ge=0)
    """Length of the warm-up, w steps."""
    warmup_epochs: float | None = Field(default=None, ge=0)
    """The same in epochs."""
    warmup_from: float | None = Field(default=None, ge=0)
    """Rate of step 0. Gradual: grows to ``lr``, reached in step w; not set, from lr/w on, to ``lr``
    in step w-1. Constant: the rate of all w steps; not set, ``lr`` unscaled. Where a small batch
    scales the peak below it, the peak; where nothing is scaled, at most ``lr``."""
    decay: Literal["constant", "cosine", "step", "poly"] = "constant"
    """Whether the rate stays, falls along half a cosine, in steps, or as a power."""
    decay_epochs: tuple[float, ...] = ()
    """For "step": epochs, counted from the start of the run, from which the rate is lower."""
    decay_factor: float = Field(default=0.1, gt=0)
    """For "step": what the rate is multiplied by at each of them."""
    decay_power: float = Field(default=2.0, gt=0)
    """For "poly": the power of the share of the way that is left."""
    decay_length: float | None = Field(default=None, gt=0)
    """For "cosine" and "poly": epochs from the end of warm-up until the floor is reached; not set,
    to the end of the run."""
    decay_floor: float = Field(default=0.0, ge=0, le=1)
    """For "cosine" and "poly": share of the peak that is reached and held."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Acts as the rate times this, once; has no schedule of its own. Not on biases and norms."""
    decay_all: bool = False
    """Decay biases and the parameters of norms, too, and give them ratios."""

    @model_validator(mode="after")
    def _keys_fit_the_choices(self) -> Self:
        for chooser, owners in _BELONGS.items():
            choice = getattr(self, chooser)
            for key, choices in owners.items():
                if choice not in choices and self._is_set(key):
                    wanted = " or ".join(f'"{word}"' for word in choices)
                    raise ValueError(
                        f"{key} belongs to {chooser} = {wanted}, and {chooser} is "
                        f'"{choice}": leave {key} out, or choose that {chooser}'
                    )
        return self

    @model_validator(mode="after")
    def _warm_up_is_told_once(self) -> Self:
        if self.warmup_steps and self.warmup_epochs is not None:
            raise ValueError("warmup_steps and warmup_epochs both tell its length: leave one out")
        if not (self.warmup_steps or self.warmup_epochs):
            if self.warmup == "constant":
                raise ValueError('warmup = "constant" needs warmup_steps or warmup_epochs')
            if self.warmup_from is not None:
                raise ValueError("warmup_from needs warmup_steps or warmup_epochs")
        return self

    @model_validator(mode="after")
    def _warm_up_does_not_fall(self) -> Self:
        scaled = self.reference_batch is not None and self.scaling != "none"
        if not scaled and self.warmup_from is not None and self.warmup_from > self.lr:
            raise ValueError(
                f"warmup_from = {self.warmup_from:g} is above lr = {self.lr:g}, and a warm-up does "
                "not fall: lower warmup_from, or raise lr"
            )
        return self

    @model_validator(mode="after")
    def _decay_points_are_in_order(self) -> Self:
        if self.decay == "step" and not self.decay_epochs:
            raise ValueError('decay = "step" needs decay_epochs, such as [30, 60, 80]')
        before = 0.0
        for epoch in self.decay_epochs:
            if epoch <= before:
                raise ValueError(
                    f"decay_epochs = {list(self.decay_epochs)}: expected growing numbers above 0"
                )
            before = epoch
        return self

    @model_validator(mode="after")
    def _scaling_has_a_reference(self) -> Self:
        if self.reference_batch is None:
            for key, is_set in (
                ("scaling", self.scaling == "sqrt"),
                ("for_batch", self._is_set("for_batch")),
            ):
                if is_set:
                    raise ValueError(f"{key} needs reference_batch, the batch that lr belongs to")
        return self

    @classmethod
    def rate_keys(cls) -> frozenset[str]:
        """Return the keys that only shape the rate: a resumed run may change them."""
        return frozenset(RateConfig.model_fields) - {"weight_decay", "decay_all"}

    def _is_set(self, key: str) -> bool:
        """Say whether ``key`` differs from its default: run files written out hold all keys."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)


class SGDConfig(RateConfig):
    """The ``[optim]`` table whose ``kind`` is ``"sgd"``."""

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False
    """Look ahead along the momentum; needs some."""
    order: Order = "outside"
    """Whether the rate multiplies what momentum remembers ("outside", as torch does) or what it
    takes in ("inside")."""
    momentum_correction: bool = False
    """For order = "inside": rescale what is remembered when the rate changes."""

    @model_validator(mode="after")
    def _momentum_can_be(self) -> Self:
        momentum_of(self)
        return self


class LARSConfig(RateConfig):
    """The ``[optim]`` table whose ``kind`` is ``"lars"``."""

    kind: Literal["lars"] = "lars"
    lr: float = Field(default=2.0, gt=0)
    """Learning rate after warm-up; at ``reference_batch`` samples a step, where that is set."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False
    """Look ahead along the momentum; needs some."""
    order: Order = "inside"
    """Whether the rate multiplies what momentum takes in ("inside", as published) or what it
    remembers ("outside")."""
    momentum_correction: bool = False
    """For order = "inside": rescale what is remembered when the rate changes."""
    trust: float = Field(default=0.001, gt=0)
    """How far a layer goes at a rate of 1, relative to its own norm."""
    eps: float = Field(default=1e-8, ge=0)
    """Added to the denominator of the ratio; tiny, or layers with small gradients slow down."""
    ratio_decay: RatioDecay = "plain"
    """The decay in the denominator of the ratio: weight_decay itself ("plain"), or the peak rate
    times weight_decay ("peak")."""
    norm_group: int = Field(default=1, ge=1)
    """Ranks in a row of whose mean weights and gradients norms are taken; 1: each rank's own. Where
    all ranks have one model they are the same."""
    norm_group_from_epoch: float = Field(default=0.0, ge=0)
    """The epoch, counted from the start of the run, from which on norms are a group's."""

    @model_validator(mode="after")
    def _momentum_can_be(self) -> Self:
        momentum_of(self)
        return self

    @model_validator(mode="after")
    def _groups_begin_where_there_are_some(self) -> Self:
        if self.norm_group == 1 and self._is_set("norm_group_from_epoch"):
            raise ValueError(
                "norm_group_from_epoch says from when on norms are a group's, and norm_group = 1 "
                "is none: set norm_group, or leave norm_group_from_epoch out"
            )
        return self


class MomentsConfig(RateConfig):
    """What Adam and its kin share."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate after warm-up; at ``reference_batch`` samples a step, where that is set."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Share of the mean of gradients that a step keeps."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """The same of their squares."""
    eps: float = Field(default=1e-8, ge=0)
    """Keeps the denominator off 0."""


class AdamConfig(MomentsConfig):
    """The ``[optim]`` table whose ``kind`` is ``"adam"``."""

    kind: Literal["adam"] = "adam"


class AdamWConfig(MomentsConfig):
    """The ``[optim]`` table whose ``kind`` is ``"adamw"``."""

    kind: Literal["adamw"] = "adamw"


class LAMBConfig(MomentsConfig):
    """The ``[optim]`` table whose ``kind`` is ``"lamb"``."""

    kind: Literal["lamb"] = "lamb"
    eps: float = Field(default=1e-6, ge=0)
    """Keeps the denominator off 0."""
    norm_limit: float | None = Field(default=None, gt=0)
    """The most that a layer's norm counts in its ratio; no limit when not set."""


AnyOptim = SGDConfig | LARSConfig | LAMBConfig | AdamConfig | AdamWConfig
"""One of the tables."""

OptimConfig = Annotated[AnyOptim, Field(discriminator="kind")]


def momentum_of(config: SGDConfig | LARSConfig) -> Momentum:
    """Return the momentum that a table asks for.

    Raises:
        ValueError: Its keys cannot be together.
    """
    keys: dict[str, Any] = {key: getattr(config, key) for key in Momentum.__slots__}
    try:
        return Momentum(**keys)
    except ConfigError as wrong:
        raise ValueError(str(wrong)) from None

"""The ``[optim]`` table of a run file: one config class for each kind of optimizer."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from stretto.config import Config
from stretto.errors import ConfigError
from stretto.optim.layer_optimizer import RatioDecay
from stretto.optim.rules import Momentum, MomentumOrder

_KEYS_BY_CHOICE: dict[str, dict[str, tuple[str, ...]]] = {
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
"""For each key that selects a kind: the keys that depend on it, and the kinds that read them."""


class LearningRateConfig(Config):
    """The settings that all optimizers share: learning rate, batch scaling, schedule and decay.

    A key that the chosen warm-up or decay does not read must keep its default.
    """

    lr: float = Field(default=0.1, gt=0)
    """Learning rate after warm-up, for ``reference_batch`` samples a step if that is set."""
    reference_batch: int | None = Field(default=None, ge=1)
    """The batch that ``lr`` belongs to; the rate of any other batch is derived by ``scaling``. Not
    set: ``lr`` is used as it is, for every batch."""
    scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate grows with batch / ``reference_batch``: linearly, as its square root, or not."""
    for_batch: int | None = Field(default=None, ge=1)
    """Derive the rate for this batch instead of train.batch."""
    warmup: Literal["gradual", "constant", "none"] = "gradual"
    """Warm-up: "gradual" raises the rate in every step, "constant" holds a lower rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Length of the warm-up in steps; w below."""
    warmup_epochs: float | None = Field(default=None, ge=0)
    """Length of the warm-up in epochs, instead of ``warmup_steps``."""
    warmup_from: float | None = Field(default=None, ge=0)
    """Rate of step 0. "gradual": the rate grows from it and reaches the peak in step w; not set, it
    grows from peak/w and reaches the peak in step w-1. "constant": the rate of all w steps; not
    set, ``lr`` without scaling. Never above the peak: without scaling a larger value is refused;
    if a small batch scales the peak below it, the peak is used."""
    decay: Literal["constant", "cosine", "step", "poly"] = "constant"
    """Decay of the rate after warm-up: none, half a cosine, in steps, or polynomial."""
    decay_epochs: tuple[float, ...] = ()
    """For "step": the epochs, counted from the start of the run, at which the rate drops."""
    decay_factor: float = Field(default=0.1, gt=0)
    """For "step": the factor of the rate at each of ``decay_epochs``."""
    decay_power: float = Field(default=2.0, gt=0)
    """For "poly": the exponent of the remaining fraction of ``decay_length``."""
    decay_length: float | None = Field(default=None, gt=0)
    """For "cosine" and "poly": epochs from the end of warm-up until the floor is reached. Not set:
    until the end of the run."""
    decay_floor: float = Field(default=0.0, ge=0, le=1)
    """For "cosine" and "poly": the final rate, as a fraction of the peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay, multiplied by the learning rate of the step; it has no schedule of its own.
    Biases and the parameters of normalisation layers do not decay unless ``decay_all`` is set."""
    decay_all: bool = False
    """Apply weight decay and trust ratios to biases and to normalisation layers, too."""

    @model_validator(mode="after")
    def _keys_fit_the_choices(self) -> Self:
        for choice_key, choices_by_key in _KEYS_BY_CHOICE.items():
            choice = getattr(self, choice_key)
            for key, choices in choices_by_key.items():
                if choice not in choices and self._is_set(key):
                    allowed = " or ".join(f'"{word}"' for word in choices)
                    raise ValueError(
                        f"{key} belongs to {choice_key} = {allowed}, and {choice_key} is "
                        f'"{choice}": leave {key} out, or choose that {choice_key}'
                    )
        return self

    @model_validator(mode="after")
    def _warm_up_length_is_set_once(self) -> Self:
        if self.warmup_steps and self.warmup_epochs is not None:
            raise ValueError("warmup_steps and warmup_epochs both set the length: leave one out")
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
        """Return the keys that only affect the learning rate; a resumed run may change them."""
        return frozenset(LearningRateConfig.model_fields) - {"weight_decay", "decay_all"}

    def _is_set(self, key: str) -> bool:
        """Return whether ``key`` differs from its default; a written run file has all keys."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)


class SGDConfig(LearningRateConfig):
    """The ``[optim]`` table whose ``kind`` is ``"sgd"``."""

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Fraction of the momentum buffer that a step keeps."""
    nesterov: bool = False
    """Use Nesterov momentum; needs ``momentum`` above 0."""
    order: MomentumOrder = "outside"
    """Whether the learning rate multiplies the momentum buffer ("outside", as in PyTorch) or the
    gradient before it enters the buffer ("inside")."""
    momentum_correction: bool = False
    """For order = "inside": rescale the momentum buffer when the learning rate changes."""

    @model_validator(mode="after")
    def _momentum_is_valid(self) -> Self:
        momentum_of(self)
        return self


class LARSConfig(LearningRateConfig):
    """The ``[optim]`` table whose ``kind`` is ``"lars"``."""

    kind: Literal["lars"] = "lars"
    lr: float = Field(default=2.0, gt=0)
    """Learning rate after warm-up, for ``reference_batch`` samples a step if that is set."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Fraction of the momentum buffer that a step keeps."""
    nesterov: bool = False
    """Use Nesterov momentum; needs ``momentum`` above 0."""
    order: MomentumOrder = "inside"
    """Whether the learning rate multiplies the gradient before it enters the momentum buffer
    ("inside", as published) or the buffer itself ("outside")."""
    momentum_correction: bool = False
    """For order = "inside": rescale the momentum buffer when the learning rate changes."""
    trust: float = Field(default=0.001, gt=0)
    """The step of a layer at a learning rate of 1, relative to the norm of its weights."""
    eps: float = Field(default=1e-8, ge=0)
    """Added to the denominator of the trust ratio. Keep it tiny: a larger value slows down layers
    with small gradients."""
    ratio_decay: RatioDecay = "plain"
    """The decay in the denominator of the trust ratio: weight_decay itself ("plain"), or the peak
    learning rate times weight_decay ("peak")."""
    norm_group: int = Field(default=1, ge=1)
    """Take norms of the mean weights and gradients of groups of this many consecutive ranks. 1:
    each rank takes its own norms. It makes no difference if all ranks have the same model."""
    norm_group_from_epoch: float = Field(default=0.0, ge=0)
    """The epoch, counted from the start of the run, at which ``norm_group`` takes effect."""

    @model_validator(mode="after")
    def _momentum_is_valid(self) -> Self:
        momentum_of(self)
        return self

    @model_validator(mode="after")
    def _norm_group_start_needs_a_group(self) -> Self:
        if self.norm_group == 1 and self._is_set("norm_group_from_epoch"):
            raise ValueError(
                "norm_group_from_epoch has no effect with norm_group = 1: set norm_group, or "
                "leave norm_group_from_epoch out"
            )
        return self


class AdamFamilyConfig(LearningRateConfig):
    """The settings that Adam, AdamW and LAMB share."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate after warm-up, for ``reference_batch`` samples a step if that is set."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Fraction of the running mean of gradients that a step keeps."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Fraction of the running mean of squared gradients that a step keeps."""
    eps: float = Field(default=1e-8, ge=0)
    """Added to the denominator, so that it is never 0."""


class AdamConfig(AdamFamilyConfig):
    """The ``[optim]`` table whose ``kind`` is ``"adam"``."""

    kind: Literal["adam"] = "adam"


class AdamWConfig(AdamFamilyConfig):
    """The ``[optim]`` table whose ``kind`` is ``"adamw"``."""

    kind: Literal["adamw"] = "adamw"


class LAMBConfig(AdamFamilyConfig):
    """The ``[optim]`` table whose ``kind`` is ``"lamb"``."""

    kind: Literal["lamb"] = "lamb"
    eps: float = Field(default=1e-6, ge=0)
    """Added to the denominator, so that it is never 0."""
    norm_limit: float | None = Field(default=None, gt=0)
    """Upper limit of the weight norm in the trust ratio; no limit when not set."""


AnyOptimConfig = SGDConfig | LARSConfig | LAMBConfig | AdamConfig | AdamWConfig
"""A table of any kind."""

OptimConfig = Annotated[AnyOptimConfig, Field(discriminator="kind")]
"""The ``[optim]`` table of a run file; ``kind`` selects the class."""


def momentum_of(config: SGDConfig | LARSConfig) -> Momentum:
    """Return the momentum settings of a table.

    Raises:
        ValueError: The settings contradict each other.
    """
    keys: dict[str, Any] = {key: getattr(config, key) for key in Momentum.__slots__}
    try:
        return Momentum(**keys)
    except ConfigError as error:
        raise ValueError(str(error)) from None

"""Derives the learning-rate schedule of a run from its ``[optim]`` table, and explains it.

The rate is a pure function of the step. It does not depend on the number of ranks or on gradient
accumulation, so a resumed or resharded run needs no schedule state. Linear scaling and gradual
warm-up are those of Goyal et al. 2017, arXiv:1706.02677.
"""

import math
from dataclasses import dataclass
from typing import Literal

from stretto.errors import ConfigError
from stretto.optim.configs import AnyOptimConfig, LAMBConfig, LARSConfig, SGDConfig
from stretto.optim.layer_optimizer import NormSharing


@dataclass(frozen=True, slots=True)
class LRWarmUp:
    """The first ``steps`` steps, below the peak rate."""

    kind: Literal["gradual", "constant", "none"] = "none"
    steps: int = 0
    start_rate: float | None = None
    """Rate of step 0. None is only for "gradual": step 0 then has the peak divided by ``steps``,
    and the peak is reached one step earlier."""

    def rate_at(self, step: int, peak: float) -> float:
        """Return the rate of ``step``, which must be in the warm-up."""
        if self.start_rate is None:
            return peak * (step + 1) / self.steps
        if self.kind == "constant":
            return self.start_rate
        return self.start_rate + (peak - self.start_rate) * step / self.steps


@dataclass(frozen=True, slots=True)
class LRDecay:
    """The decay after warm-up, as a fraction of the peak rate."""

    kind: Literal["constant", "cosine", "step", "poly"] = "constant"
    milestones: tuple[int, ...] = ()
    """For "step": the steps at which the rate is multiplied by ``factor``."""
    factor: float = 0.1
    length: int = 1
    """For "cosine" and "poly": steps until the floor is reached."""
    power: float = 2.0
    floor: float = 0.0
    """For "cosine" and "poly": the final fraction of the peak."""

    def share_at(self, step: int, start_step: int) -> float:
        """Return the fraction of the peak at ``step``, when the decay begins at ``start_step``."""
        if self.kind == "constant":
            return 1.0
        if self.kind == "step":
            return math.prod(self.factor for milestone in self.milestones if milestone <= step)
        steps_done = min(step - start_step, self.length)
        if self.kind == "cosine":
            share = 0.5 * (1 + math.cos(math.pi * steps_done / self.length))
        else:
            share = (1 - steps_done / self.length) ** self.power
        return (1 - self.floor) * share + self.floor


def scheduled_rate(peak: float, warm_up: LRWarmUp, decay: LRDecay, step: int) -> float:
    """Return the rate of ``step``: in the warm-up, or the peak times the decay's fraction."""
    if step < warm_up.steps:
        return warm_up.rate_at(step, peak)
    return peak * decay.share_at(step, warm_up.steps)


@dataclass(frozen=True, slots=True)
class DerivationLine:
    """One derived quantity, for people: its name, its value, and the rule that gave it."""

    name: str
    value: str
    rule: str


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """The learning-rate schedule of one run, in steps; created by `derive_lr_schedule`."""

    config: AnyOptimConfig
    lr: float
    """The peak rate."""
    batch: int
    """The batch, in samples a step, for which the peak rate was derived."""
    epoch_steps: int
    """Steps in an epoch."""
    total_steps: int
    """Steps of the run, which may end before its schedule does."""
    warm_up: LRWarmUp
    decay: LRDecay

    def rate_at(self, step: int) -> float:
        """Return the rate of ``step``, counted from 0; a pure function."""
        return scheduled_rate(self.lr, self.warm_up, self.decay, step)

    @property
    def norm_sharing(self) -> NormSharing | None:
        """The groups of ranks that share norms, for LARS; None without groups."""
        config = self.config
        if not isinstance(config, LARSConfig) or config.norm_group == 1:
            return None
        return NormSharing(
            config.norm_group, round(config.norm_group_from_epoch * self.epoch_steps)
        )

    def warnings(self) -> list[str]:
        """Return a warning for each setting that will have no effect in this run."""
        norm_sharing = self.norm_sharing
        if norm_sharing is None or norm_sharing.from_step < self.total_steps:
            return []
        return [
            f"optim.norm_group = {norm_sharing.group_size} is never active: "
            f"optim.norm_group_from_epoch is step {norm_sharing.from_step}, and the run ends after "
            f"{self.total_steps} steps"
        ]

    def lines(self) -> tuple[DerivationLine, ...]:
        """Return the derived quantities and their rules, for people."""
        all_lines = [
            _explain_rate(self),
            _explain_warm_up(self),
            *_explain_decay(self),
            *_explain_early_end(self),
        ]
        all_lines.append(_explain_weight_decay(self))
        if isinstance(self.config, SGDConfig | LARSConfig):
            all_lines.append(_explain_momentum(self.config))
        else:
            all_lines.append(_explain_moments(self.config))
        if isinstance(self.config, LARSConfig | LAMBConfig):
            all_lines.append(_explain_trust_ratio(self.config, self))
        return tuple(all_lines)


def derive_lr_schedule(
    config: AnyOptimConfig, *, batch: int, epoch_steps: int, total_steps: int
) -> LearningRateSchedule:
    """Return the schedule of a run of ``total_steps`` steps of ``batch`` samples.

    Args:
        config: The ``[optim]`` table.
        batch: Samples a step, over all ranks.
        epoch_steps: Steps in an epoch.
        total_steps: Steps of the run.

    Raises:
        ConfigError: The decay would begin before the warm-up ends.
    """
    batch = config.for_batch or batch
    peak = config.lr * _lr_scale(config, batch)
    warm_up = _derive_warm_up(config, peak, epoch_steps)
    if config.decay_length is None:
        length = total_steps - warm_up.steps
    else:
        length = round(config.decay_length * epoch_steps)
    decay = LRDecay(
        kind=config.decay,
        milestones=tuple(round(epoch * epoch_steps) for epoch in config.decay_epochs),
        factor=config.decay_factor,
        length=max(1, length),
        power=config.decay_power,
        floor=config.decay_floor,
    )
    if decay.milestones and decay.milestones[0] < warm_up.steps:
        raise ConfigError(
            f"optim.decay_epochs begins at epoch {config.decay_epochs[0]:g}, which is step "
            f"{decay.milestones[0]}, inside the warm-up of {warm_up.steps} steps: shorten the "
            "warm-up or decay later"
        )
    return LearningRateSchedule(config, peak, batch, epoch_steps, total_steps, warm_up, decay)


def _lr_scale(config: AnyOptimConfig, batch: int) -> float:
    if config.reference_batch is None or config.scaling == "none":
        return 1.0
    times = batch / config.reference_batch
    return times if config.scaling == "linear" else math.sqrt(times)


def _derive_warm_up(config: AnyOptimConfig, peak: float, epoch_steps: int) -> LRWarmUp:
    steps = config.warmup_steps or round((config.warmup_epochs or 0) * epoch_steps)
    if config.warmup == "none" or not steps:
        return LRWarmUp()
    start_rate = config.warmup_from
    if start_rate is None and config.warmup == "constant":
        start_rate = config.lr
    # A batch far below the reference may scale the peak below the start rate of the warm-up.
    return LRWarmUp(config.warmup, steps, None if start_rate is None else min(start_rate, peak))


def _explain_rate(schedule: LearningRateSchedule) -> DerivationLine:
    config, reference = schedule.config, schedule.config.reference_batch
    rule = "as set"
    if reference is not None:
        for_batch = " (optim.for_batch)" if config.for_batch else ""
        share = f"{schedule.batch} / {reference}"
        rule = {
            "linear": f"{config.lr:g} x {share}, linear scaling{for_batch}",
            "sqrt": f"{config.lr:g} x sqrt({share}), square-root scaling{for_batch}",
            "none": f"as set for {reference} samples, not scaled",
        }[config.scaling]
    return DerivationLine("lr", f"{schedule.lr:g}", rule)


def _explain_warm_up(schedule: LearningRateSchedule) -> DerivationLine:
    warm_up = schedule.warm_up
    if not warm_up.steps:
        return DerivationLine("warm-up", "none", "the first step is at the full rate")
    if warm_up.kind == "constant":
        rule = f"constant at {warm_up.rate_at(0, schedule.lr):g}"
    else:
        start_rate = warm_up.rate_at(0, schedule.lr)
        rule = f"gradual, {start_rate:g} to {schedule.lr:g}, by equal parts in every step"
    return DerivationLine("warm-up", _format_length(warm_up.steps, schedule), rule)


def _explain_decay(schedule: LearningRateSchedule) -> list[DerivationLine]:
    decay, begins = schedule.decay, schedule.warm_up.steps
    if decay.kind == "constant":
        return [DerivationLine("decay", "none", "the rate stays")]
    if decay.kind == "step":
        epochs = ", ".join(f"{epoch:g}" for epoch in schedule.config.decay_epochs)
        steps = ", ".join(str(milestone) for milestone in decay.milestones)
        return [
            DerivationLine(
                "decay", f"x {decay.factor:g} at epochs {epochs}", f"from steps {steps} on"
            )
        ]
    curve = f"power {decay.power:g}" if decay.kind == "poly" else "half a cosine"
    if schedule.config.decay_length is None and schedule.total_steps <= begins:
        return [DerivationLine("decay", curve, "never begins: the run ends first")]
    return [
        DerivationLine(
            "decay",
            f"{curve} over {_format_length(decay.length, schedule)}",
            f"from step {begins} on",
        ),
        _explain_floor(schedule),
    ]


def _explain_floor(schedule: LearningRateSchedule) -> DerivationLine:
    decay, ends = schedule.decay, schedule.warm_up.steps + schedule.decay.length
    if ends < schedule.total_steps:
        when = f"the rate of every step from {ends} on"
    elif ends == schedule.total_steps:
        when = f"reached as the run ends, after {ends} steps"
    else:
        when = "not reached"
    share = f"{decay.floor:g} x {schedule.lr:g}, " if decay.floor else ""
    return DerivationLine("floor", f"{decay.floor * schedule.lr:g}", share + when)


def _explain_early_end(schedule: LearningRateSchedule) -> list[DerivationLine]:
    """Return a line if the run ends before its schedule does, else nothing."""
    total, warm_up, decay = schedule.total_steps, schedule.warm_up, schedule.decay
    missed = [milestone for milestone in decay.milestones if milestone >= total]
    if total < warm_up.steps or (total == warm_up.steps and decay.kind in ("poly", "cosine")):
        cut = f"in the warm-up of {warm_up.steps} steps"
    elif missed:
        cut = f"before the decay from step {missed[0]} on"
    elif decay.kind in ("poly", "cosine") and total < warm_up.steps + decay.length:
        cut = f"in the decay, {warm_up.steps + decay.length - total} steps before its end"
    else:
        return []
    rule = f"the run ends {cut}, at a rate of {schedule.rate_at(total - 1):g}"
    return [DerivationLine("length", f"{total} steps", rule)]


def _explain_weight_decay(schedule: LearningRateSchedule) -> DerivationLine:
    config = schedule.config
    where_added = {"adamw": "apart from the gradient", "lamb": "added to the direction"}.get(
        config.kind, "added to the gradient"
    )
    on = "on every parameter" if config.decay_all else "not on biases and norms"
    rule = f"{where_added}, {on}; times the rate of the step, once"
    return DerivationLine("weight decay", f"{config.weight_decay:g}", rule)


def _explain_momentum(config: SGDConfig | LARSConfig) -> DerivationLine:
    if not config.momentum:
        return DerivationLine("momentum", "0", "none")
    value = f"{config.momentum:g}" + (", Nesterov" if config.nesterov else "")
    rule = {
        "outside": "w -= lr u: what is remembered follows the rate of the step",
        "inside": "v += lr d: what is remembered keeps the rate it was seen at",
    }[config.order]
    if config.momentum_correction:
        rule = "v += lr d, v rescaled when the rate changes"
    return DerivationLine("momentum", value, rule)


def _explain_moments(config: AnyOptimConfig) -> DerivationLine:
    assert not isinstance(config, SGDConfig | LARSConfig)
    return DerivationLine("betas", f"{config.beta1:g}, {config.beta2:g}", f"eps {config.eps:g}")


def _explain_trust_ratio(
    config: LARSConfig | LAMBConfig, schedule: LearningRateSchedule
) -> DerivationLine:
    peak, norm_sharing = schedule.lr, schedule.norm_sharing
    if isinstance(config, LAMBConfig):
        limit = f", |w| counted up to {config.norm_limit:g}" if config.norm_limit else ""
        return DerivationLine("ratio", "|w| / |update|", f"per layer{limit}")
    decay = config.weight_decay * (peak if config.ratio_decay == "peak" else 1)
    why = f"{peak:g} x {config.weight_decay:g}" if config.ratio_decay == "peak" else "weight decay"
    value = f"{config.trust:g} |w| / (|g| + {decay:g} |w| + {config.eps:g})"
    rule = f"per layer; the factor of |w| below is {why}"
    if norm_sharing is not None:
        rule += (
            f"; norms of the mean of {norm_sharing.group_size} ranks from step "
            f"{norm_sharing.from_step} on"
        )
    return DerivationLine("ratio", value, rule)


def _format_length(steps: int, schedule: LearningRateSchedule) -> str:
    return f"{steps} steps ({steps / schedule.epoch_steps:g} epochs)"

"""What a batch and a length make of an ``[optim]`` table: rates, steps, and the rules behind them.

Linear scaling and gradual warm-up are those of Goyal et al. 2017, arXiv:1706.02677.
"""

import math
from dataclasses import dataclass

from stretto.errors import ConfigError
from stretto.optim.configs import AnyOptim, LAMBConfig, LARSConfig, SGDConfig
from stretto.optim.norms import Sharing
from stretto.optim.rate import Decay, WarmUp, rate_of


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was derived: what it is, its value, and the rule that gave it."""

    name: str
    value: str
    rule: str


@dataclass(frozen=True, slots=True)
class Derived:
    """A schedule in steps, ready to be asked for rates and to be told."""

    config: AnyOptim
    lr: float
    """The peak rate."""
    batch: int
    """What the rate was derived for."""
    epoch_steps: int
    total_steps: int
    """Length of the run, which may end before its schedule does."""
    warm_up: WarmUp
    decay: Decay

    def rate_at(self, step: int) -> float:
        """Return the rate of ``step``, counted from 0; a pure function."""
        return rate_of(self.lr, self.warm_up, self.decay, step)

    @property
    def sharing(self) -> Sharing | None:
        """Who shares norms, and from which step on; None where nobody does."""
        config = self.config
        if not isinstance(config, LARSConfig) or config.norm_group == 1:
            return None
        return Sharing(config.norm_group, round(config.norm_group_from_epoch * self.epoch_steps))

    def remarks(self) -> list[str]:
        """Return what people should know before the first step: settings that will do nothing."""
        sharing = self.sharing
        if sharing is None or sharing.from_step < self.total_steps:
            return []
        return [
            f"optim.norm_group = {sharing.width} is never active: optim.norm_group_from_epoch is "
            f"step {sharing.from_step}, and the run ends after {self.total_steps} steps"
        ]

    def lines(self) -> tuple[Line, ...]:
        """Return what was derived and by which rule, for people."""
        told = [_tell_rate(self), _tell_warm_up(self), *_tell_decay(self), *_tell_length(self)]
        told.append(_tell_shrinking(self))
        if isinstance(self.config, SGDConfig | LARSConfig):
            told.append(_tell_momentum(self.config))
        else:
            told.append(_tell_moments(self.config))
        if isinstance(self.config, LARSConfig | LAMBConfig):
            told.append(_tell_ratio(self.config, self))
        return tuple(told)


def derive(config: AnyOptim, *, batch: int, epoch_steps: int, total_steps: int) -> Derived:
    """Work out the schedule of a run of ``total_steps`` steps of ``batch`` samples.

    Raises:
        ConfigError: The rate would fall before the warm-up ends.
    """
    batch = config.for_batch or batch
    peak = config.lr * _growth(config, batch)
    warm_up = _warm_up(config, peak, epoch_steps)
    if config.decay_length is None:
        length = total_steps - warm_up.steps
    else:
        length = round(config.decay_length * epoch_steps)
    decay = Decay(
        kind=config.decay,
        points=tuple(round(epoch * epoch_steps) for epoch in config.decay_epochs),
        factor=config.decay_factor,
        length=max(1, length),
        power=config.decay_power,
        floor=config.decay_floor,
    )
    if decay.points and decay.points[0] < warm_up.steps:
        raise ConfigError(
            f"optim.decay_epochs begins at epoch {config.decay_epochs[0]:g}, which is step "
            f"{decay.points[0]}, inside the warm-up of {warm_up.steps} steps: shorten the warm-up "
            "or decay later"
        )
    return Derived(config, peak, batch, epoch_steps, total_steps, warm_up, decay)


def _growth(config: AnyOptim, batch: int) -> float:
    if config.reference_batch is None or config.scaling == "none":
        return 1.0
    times = batch / config.reference_batch
    return times if config.scaling == "linear" else math.sqrt(times)


def _warm_up(config: AnyOptim, peak: float, epoch_steps: int) -> WarmUp:
    steps = config.warmup_steps or round((config.warmup_epochs or 0) * epoch_steps)
    if config.warmup == "none" or not steps:
        return WarmUp()
    first = config.warmup_from
    if first is None and config.warmup == "constant":
        first = config.lr
    # A batch far below the reference may scale the peak below the rate that warm-up starts from.
    return WarmUp(config.warmup, steps, None if first is None else min(first, peak))


def _tell_rate(derived: Derived) -> Line:
    config, reference = derived.config, derived.config.reference_batch
    rule = "as set"
    if reference is not None:
        for_batch = " (optim.for_batch)" if config.for_batch else ""
        share = f"{derived.batch} / {reference}"
        rule = {
            "linear": f"{config.lr:g} x {share}, linear scaling{for_batch}",
            "sqrt": f"{config.lr:g} x sqrt({share}), square-root scaling{for_batch}",
            "none": f"as set for {reference} samples, not scaled",
        }[config.scaling]
    return Line("lr", f"{derived.lr:g}", rule)


def _tell_warm_up(derived: Derived) -> Line:
    warm_up = derived.warm_up
    if not warm_up.steps:
        return Line("warm-up", "none", "the first step is at the full rate")
    if warm_up.kind == "constant":
        rule = f"constant at {warm_up.rate_at(0, derived.lr):g}"
    else:
        first = warm_up.rate_at(0, derived.lr)
        rule = f"gradual, {first:g} to {derived.lr:g}, by equal parts in every step"
    return Line("warm-up", _length(warm_up.steps, derived), rule)


def _tell_decay(derived: Derived) -> list[Line]:
    decay, begins = derived.decay, derived.warm_up.steps
    if decay.kind == "constant":
        return [Line("decay", "none", "the rate stays")]
    if decay.kind == "step":
        epochs = ", ".join(f"{epoch:g}" for epoch in derived.config.decay_epochs)
        steps = ", ".join(str(point) for point in decay.points)
        return [Line("decay", f"x {decay.factor:g} at epochs {epochs}", f"from steps {steps} on")]
    curve = f"power {decay.power:g}" if decay.kind == "poly" else "half a cosine"
    if derived.config.decay_length is None and derived.total_steps <= begins:
        return [Line("decay", curve, "never begins: the run ends first")]
    return [
        Line("decay", f"{curve} over {_length(decay.length, derived)}", f"from step {begins} on"),
        _tell_floor(derived),
    ]


def _tell_floor(derived: Derived) -> Line:
    decay, ends = derived.decay, derived.warm_up.steps + derived.decay.length
    if ends < derived.total_steps:
        when = f"the rate of every step from {ends} on"
    elif ends == derived.total_steps:
        when = f"reached as the run ends, after {ends} steps"
    else:
        when = "not reached"
    share = f"{decay.floor:g} x {derived.lr:g}, " if decay.floor else ""
    return Line("floor", f"{decay.floor * derived.lr:g}", share + when)


def _tell_length(derived: Derived) -> list[Line]:
    """Return a line where the run ends before its schedule does; none where it does not."""
    total, warm_up, decay = derived.total_steps, derived.warm_up, derived.decay
    missed = [point for point in decay.points if point >= total]
    if total < warm_up.steps or (total == warm_up.steps and decay.kind in ("poly", "cosine")):
        cut = f"in the warm-up of {warm_up.steps} steps"
    elif missed:
        cut = f"before the decay from step {missed[0]} on"
    elif decay.kind in ("poly", "cosine") and total < warm_up.steps + decay.length:
        cut = f"in the decay, {warm_up.steps + decay.length - total} steps before its end"
    else:
        return []
    rule = f"the run ends {cut}, at a rate of {derived.rate_at(total - 1):g}"
    return [Line("length", f"{total} steps", rule)]


def _tell_shrinking(derived: Derived) -> Line:
    config = derived.config
    apart = {"adamw": "apart from the gradient", "lamb": "added to the direction"}.get(
        config.kind, "added to the gradient"
    )
    on = "on every parameter" if config.decay_all else "not on biases and norms"
    rule = f"{apart}, {on}; times the rate of the step, once"
    return Line("weight decay", f"{config.weight_decay:g}", rule)


def _tell_momentum(config: SGDConfig | LARSConfig) -> Line:
    if not config.momentum:
        return Line("momentum", "0", "none")
    value = f"{config.momentum:g}" + (", Nesterov" if config.nesterov else "")
    rule = {
        "outside": "w -= lr u: what is remembered follows the rate of the step",
        "inside": "v += lr d: what is remembered keeps the rate it was seen at",
    }[config.order]
    if config.momentum_correction:
        rule = "v += lr d, v rescaled when the rate changes"
    return Line("momentum", value, rule)


def _tell_moments(config: AnyOptim) -> Line:
    assert not isinstance(config, SGDConfig | LARSConfig)
    return Line("betas", f"{config.beta1:g}, {config.beta2:g}", f"eps {config.eps:g}")


def _tell_ratio(config: LARSConfig | LAMBConfig, derived: Derived) -> Line:
    peak, sharing = derived.lr, derived.sharing
    if isinstance(config, LAMBConfig):
        limit = f", |w| counted up to {config.norm_limit:g}" if config.norm_limit else ""
        return Line("ratio", "|w| / |update|", f"per layer{limit}")
    decay = config.weight_decay * (peak if config.ratio_decay == "peak" else 1)
    why = f"{peak:g} x {config.weight_decay:g}" if config.ratio_decay == "peak" else "weight decay"
    value = f"{config.trust:g} |w| / (|g| + {decay:g} |w| + {config.eps:g})"
    rule = f"per layer; the factor of |w| below is {why}"
    if sharing is not None:
        rule += f"; norms of the mean of {sharing.width} ranks from step {sharing.from_step} on"
    return Line("ratio", value, rule)


def _length(steps: int, derived: Derived) -> str:
    return f"{steps} steps ({steps / derived.epoch_steps:g} epochs)"

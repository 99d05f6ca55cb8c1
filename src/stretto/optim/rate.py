"""The learning rate as a pure function of the step.

Neither ranks nor accumulation enter, so a resumed or reshaped run needs no schedule state.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The first ``steps`` steps, at less than the peak."""

    kind: Literal["gradual", "constant", "none"] = "none"
    steps: int = 0
    first: float | None = None
    """Rate of step 0. Gradual: None is the peak divided by ``steps``, and the peak one step
    earlier."""

    def rate_at(self, step: int, peak: float) -> float:
        """Return the rate of a ``step`` of the warm-up."""
        if self.first is None:
            return peak * (step + 1) / self.steps
        if self.kind == "constant":
            return self.first
        return self.first + (peak - self.first) * step / self.steps


@dataclass(frozen=True, slots=True)
class Decay:
    """What follows the warm-up, as a share of the peak."""

    kind: Literal["constant", "cosine", "step", "poly"] = "constant"
    points: tuple[int, ...] = ()
    """Steps from which one more ``factor`` is in the share."""
    factor: float = 0.1
    length: int = 1
    """Steps until the floor is reached."""
    power: float = 2.0
    floor: float = 0.0

    def share_at(self, step: int, begins: int) -> float:
        """Return the share of the peak in ``step``; the curves begin in step ``begins``."""
        if self.kind == "constant":
            return 1.0
        if self.kind == "step":
            return math.prod(self.factor for point in self.points if point <= step)
        gone = min(step - begins, self.length)
        if self.kind == "cosine":
            share = 0.5 * (1 + math.cos(math.pi * gone / self.length))
        else:
            share = (1 - gone / self.length) ** self.power
        return (1 - self.floor) * share + self.floor


def rate_of(peak: float, warm_up: WarmUp, decay: Decay, step: int) -> float:
    """Return the rate of ``step``: the warm-up, then the peak times the decay's share."""
    if step < warm_up.steps:
        return warm_up.rate_at(step, peak)
    return peak * decay.share_at(step, warm_up.steps)

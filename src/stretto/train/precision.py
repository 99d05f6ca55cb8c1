"""Half precision: the type forward computes in, and the factor that keeps fp16 gradients alive.

Weights, their updates and everything an optimizer keeps stay in the model's own type, fp32: forward
casts them as it uses them. Numbers of fp16 end at 6e-8: gradients below that would vanish, so the
loss is multiplied by a scale before backward, and gradients are divided by it once they are summed,
before anybody looks at them. A scale that is too large makes them overflow; then all ranks leave
that step out and halve it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from stretto.errors import CheckpointError

Precision = Literal["fp32", "bf16", "fp16"]

HALF: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What forward and backward compute in, where it is not the weights' own type."""
FIRST_SCALE = 65536.0
LEAST_SCALE = 1.0
"""An overflow at this scale is no matter of scale."""
GROW_AFTER = 2000
"""Good steps in a row after which a larger scale is tried."""


@dataclass(slots=True)
class LossScale:
    """What losses are multiplied by; every rank that hears the same verdicts has the same one."""

    value: float = 1.0
    moves: bool = False
    """Whether verdicts change it; one that does not move is 1."""
    good_steps: int = 0

    def judge(self, finite: bool) -> None:
        """Take a step's verdict into account."""
        if not self.moves:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(LEAST_SCALE, self.value / 2)
        elif self.good_steps == GROW_AFTER:
            self.value, self.good_steps = self.value * 2, 0

    @property
    def may_fall(self) -> bool:
        """Whether an overflow may be due to the scale alone."""
        return self.moves and self.value > LEAST_SCALE

    def state_dict(self) -> dict[str, Any]:
        """Return it as JSON values; nothing where it does not move."""
        return {"value": self.value, "good_steps": self.good_steps} if self.moves else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from it; a checkpoint of another precision has none, and it starts anew."""
        if not self.moves or not state:
            return
        value, good_steps = state.get("value"), state.get("good_steps")
        if not isinstance(value, float) or not value >= LEAST_SCALE or type(good_steps) is not int:
            raise CheckpointError(f"the checkpoint's loss scale cannot be: {dict(state)}")
        self.value, self.good_steps = value, good_steps


def loss_scale(precision: Precision, first: float = FIRST_SCALE) -> LossScale:
    """Return the scale that a run in ``precision`` begins with."""
    return LossScale(first, moves=True) if precision == "fp16" else LossScale()

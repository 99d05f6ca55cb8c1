"""Mixed precision: the type of forward and backward, and loss scaling for fp16.

Weights, updates and optimizer state keep the model's own type, fp32; forward casts the weights as
it uses them. The smallest fp16 number is 6e-8, and smaller gradients would become 0. The loss is
therefore multiplied by a scale before backward, and the summed gradients are divided by it before
anything reads them. A scale that is too large makes gradients overflow. All ranks then skip that
step and halve the scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stretto.errors import CheckpointError

Precision = Literal["fp32", "bf16", "fp16"]

HALF_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of forward and backward, if it differs from that of the weights."""
INIT_SCALE = 65536.0
MIN_SCALE = 1.0
"""An overflow at this scale cannot be cured by a smaller one."""
GROWTH_INTERVAL = 2000
"""Steps without overflow after which the scale is doubled."""


def forward_in_precision(precision: Precision, model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a model's outputs, computed in ``precision``."""
    half = HALF_DTYPES.get(precision)
    with torch.autocast(inputs.device.type, half, enabled=half is not None):
        outputs: Tensor = model(inputs)
    return outputs


@dataclass(slots=True)
class LossScale:
    """The loss scale; equal on all ranks that see the same results of the finite check."""

    value: float = 1.0
    is_dynamic: bool = False
    """Whether overflows change it; a static scale is 1."""
    good_steps: int = 0

    def update(self, is_finite: bool) -> None:
        """Update the scale after a step whose gradients were finite or not."""
        if not self.is_dynamic:
            return
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.value = max(MIN_SCALE, self.value / 2)
        elif self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * 2, 0

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale could prevent an overflow."""
        return self.is_dynamic and self.value > MIN_SCALE

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values; empty for a static scale."""
        return {"value": self.value, "good_steps": self.good_steps} if self.is_dynamic else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; keep the initial scale if a run of another precision saved none."""
        if not self.is_dynamic or not state:
            return
        value, good_steps = state.get("value"), state.get("good_steps")
        if not isinstance(value, float) or not value >= MIN_SCALE or type(good_steps) is not int:
            raise CheckpointError(f"the checkpoint's loss scale is invalid: {dict(state)}")
        self.value, self.good_steps = value, good_steps


def loss_scale(precision: Precision, init_scale: float = INIT_SCALE) -> LossScale:
    """Return the initial loss scale of a run in ``precision``."""
    return LossScale(init_scale, is_dynamic=True) if precision == "fp16" else LossScale()

"""The learning rate as a pure function of the step."""

import math

from stretto.optim.builtin import AdamWConfig, SGDConfig


def rate_at(config: SGDConfig | AdamWConfig, step: int, total_steps: int) -> float:
    """Return the rate of ``step``: warm-up from lr/w to lr over w steps, then the decay.

    A function of the step alone, so that a resumed run needs no schedule state.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    span = max(1, total_steps - config.warmup_steps)
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - config.warmup_steps) / span))

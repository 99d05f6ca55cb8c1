"""Optimizers and learning rates: what is applied to the gradients once the ranks agree on them."""

from stretto.optim.builtin import AdamWConfig, OptimConfig, SGDConfig, make_optimizer
from stretto.optim.rate import rate_at

__all__ = ["AdamWConfig", "OptimConfig", "SGDConfig", "make_optimizer", "rate_at"]

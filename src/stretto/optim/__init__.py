"""Optimizers and learning rates: what is applied to the gradients once the ranks agree on them."""

from stretto.optim.adam import Adam, AdamW
from stretto.optim.configs import (
    AdamConfig,
    AdamWConfig,
    AnyOptim,
    LAMBConfig,
    LARSConfig,
    OptimConfig,
    RateConfig,
    SGDConfig,
)
from stretto.optim.derive import Derived, Line, derive
from stretto.optim.groups import split, undecayed
from stretto.optim.lamb import LAMB
from stretto.optim.lars import LARS
from stretto.optim.making import make_optimizer, stacked_optimizer
from stretto.optim.norms import Norms, own_norms
from stretto.optim.ratios import Trust
from stretto.optim.rules import Moments, Momentum
from stretto.optim.sgd import SGD

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adam",
    "AdamConfig",
    "AdamW",
    "AdamWConfig",
    "AnyOptim",
    "Derived",
    "LAMBConfig",
    "LARSConfig",
    "Line",
    "Moments",
    "Momentum",
    "Norms",
    "OptimConfig",
    "RateConfig",
    "SGDConfig",
    "Trust",
    "derive",
    "make_optimizer",
    "own_norms",
    "split",
    "stacked_optimizer",
    "undecayed",
]

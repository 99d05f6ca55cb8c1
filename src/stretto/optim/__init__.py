"""Optimizers, learning-rate schedules, and the ``[optim]`` table that configures them."""

from stretto.optim.build import (
    build_stacked_optimizer,
    make_optimizer,
    no_decay_parameter_names,
    split_by_decay,
)
from stretto.optim.configs import (
    AdamConfig,
    AdamWConfig,
    AnyOptimConfig,
    LAMBConfig,
    LARSConfig,
    LearningRateConfig,
    OptimConfig,
    SGDConfig,
)
from stretto.optim.layer_optimizer import NormFunction, TrustRatioOptions, local_norms
from stretto.optim.learning_rates import DerivationLine, LearningRateSchedule, derive_lr_schedule
from stretto.optim.optimizers import LAMB, LARS, SGD, Adam, AdamW
from stretto.optim.rules import Moments, Momentum

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adam",
    "AdamConfig",
    "AdamW",
    "AdamWConfig",
    "AnyOptimConfig",
    "DerivationLine",
    "LAMBConfig",
    "LARSConfig",
    "LearningRateConfig",
    "LearningRateSchedule",
    "Moments",
    "Momentum",
    "NormFunction",
    "OptimConfig",
    "SGDConfig",
    "TrustRatioOptions",
    "build_stacked_optimizer",
    "derive_lr_schedule",
    "local_norms",
    "make_optimizer",
    "no_decay_parameter_names",
    "split_by_decay",
]

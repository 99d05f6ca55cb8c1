"""From an ``[optim]`` table to the optimizer, once the parameters are known."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from stretto.optim.adam import Adam, AdamW
from stretto.optim.base import LayerOptimizer
from stretto.optim.configs import (
    AdamConfig,
    AdamWConfig,
    AnyOptim,
    LAMBConfig,
    LARSConfig,
    MomentsConfig,
    SGDConfig,
    momentum_of,
)
from stretto.optim.groups import UNDECAYED, split, undecayed
from stretto.optim.lamb import LAMB
from stretto.optim.lars import LARS
from stretto.optim.norms import Norms, own_norms
from stretto.optim.ratios import Trust
from stretto.optim.rules import Moments
from stretto.optim.sgd import SGD, Parameters


def make_optimizer(
    config: AnyOptim,
    model: nn.Module | None = None,
    *,
    norms: Norms = own_norms,
    peak_lr: float | None = None,
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return what builds the optimizer of ``config`` from all or some of the model's parameters.

    Args:
        config: The table; its schedule is `stretto.optim.derive`'s.
        model: Says which parameters belong to norms; without it, those of one dimension do.
        norms: Given to LARS and LAMB.
        peak_lr: The derived rate, `Derived.lr`; that of the table when not given.
    """
    peak = config.lr if peak_lr is None else peak_lr

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        mine = list(parameters)
        groups = [{"params": mine}] if config.decay_all else split(mine, model)
        return _build(config, groups, peak, norms)

    return build


def stacked_optimizer(
    config: AnyOptim,
    model: nn.Module,
    values: Mapping[str, nn.Parameter],
    *,
    peak_lr: float | None = None,
) -> LayerOptimizer:
    """Return the optimizer of ``config`` for many models at once: ``values`` are [W, ...] by name.

    Each of them is updated as if it were alone; ``model`` is like them and says what decays.
    """
    spared = frozenset[str]() if config.decay_all else undecayed(model)
    groups: list[dict[str, Any]] = [
        {"params": [value for name, value in values.items() if name not in spared]},
        {"params": [value for name, value in values.items() if name in spared], **UNDECAYED},
    ]
    peak = config.lr if peak_lr is None else peak_lr
    optimizer = _build(config, [group for group in groups if group["params"]], peak, own_norms)
    optimizer.stacked = True
    return optimizer


def _build(config: AnyOptim, groups: Parameters, peak_lr: float, norms: Norms) -> LayerOptimizer:
    decay = config.weight_decay
    match config:
        case SGDConfig():
            return SGD(groups, peak_lr, momentum=momentum_of(config), weight_decay=decay)
        case LARSConfig():
            trust = Trust(config.trust, config.eps, config.ratio_decay, peak_lr)
            momentum = momentum_of(config)
            return LARS(
                groups, peak_lr, momentum=momentum, trust=trust, weight_decay=decay, norms=norms
            )
        case LAMBConfig():
            return LAMB(
                groups,
                peak_lr,
                moments=_moments(config),
                weight_decay=decay,
                norm_limit=config.norm_limit,
                norms=norms,
            )
        case AdamConfig():
            return Adam(groups, peak_lr, moments=_moments(config), weight_decay=decay)
        case AdamWConfig():
            return AdamW(groups, peak_lr, moments=_moments(config), weight_decay=decay)


def _moments(config: MomentsConfig) -> Moments:
    return Moments(config.beta1, config.beta2, config.eps)

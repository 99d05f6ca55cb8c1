"""Builds the optimizer of an ``[optim]`` table, and splits parameters by weight decay."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from stretto.optim.configs import (
    AdamConfig,
    AdamFamilyConfig,
    AdamWConfig,
    AnyOptimConfig,
    LAMBConfig,
    LARSConfig,
    SGDConfig,
    momentum_of,
)
from stretto.optim.layer_optimizer import (
    LayerOptimizer,
    NormFunction,
    TrustRatioOptions,
    local_norms,
)
from stretto.optim.optimizers import LAMB, LARS, SGD, Adam, AdamW, Parameters
from stretto.optim.rules import Moments

NORM_LAYERS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Normalisation layers. `_NormBase` is the base of all batch norms (`nn.SyncBatchNorm` too) and of
all instance norms."""

NO_DECAY_OPTIONS: dict[str, Any] = {"weight_decay": 0.0, "adapt": False}
"""The options of a parameter group with neither weight decay nor a trust ratio."""


def no_decay_parameter_names(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters with neither weight decay nor a trust ratio.

    These are the parameters of normalisation layers, and all parameters with at most one dimension,
    such as biases. A tied parameter is one of them, under all its names, if any of its modules is
    a normalisation layer.
    """
    no_decay_ids = _no_decay_ids(model)
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if id(parameter) in no_decay_ids)


def split_by_decay(
    parameters: Iterable[nn.Parameter], model: nn.Module | None = None
) -> list[dict[str, Any]]:
    """Return two parameter groups, with and without weight decay, in the given order.

    An empty group is left out. The groups also work with torch's own optimizers, since decay is an
    option of the group. A parameter that is not in ``model`` decays if it has two dimensions or
    more.
    """
    all_parameters = list(parameters)
    no_decay_ids = _no_decay_ids(model) if model is not None else set()
    no_decay_ids |= {id(p) for p in all_parameters if p.dim() <= 1}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in all_parameters if id(p) not in no_decay_ids]},
        {"params": [p for p in all_parameters if id(p) in no_decay_ids], **NO_DECAY_OPTIONS},
    ]
    return [group for group in groups if group["params"]]


def _no_decay_ids(model: nn.Module) -> set[int]:
    norms = (module for module in model.modules() if isinstance(module, NORM_LAYERS))
    by_owner = {id(p) for norm in norms for p in norm.parameters(recurse=False)}
    return by_owner | {id(p) for p in model.parameters() if p.dim() <= 1}


def make_optimizer(
    config: AnyOptimConfig,
    model: nn.Module | None = None,
    *,
    norms: NormFunction = local_norms,
    peak_lr: float | None = None,
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that builds the optimizer of ``config`` for any parameters of the model.

    Args:
        config: The ``[optim]`` table. Its schedule is applied by the caller, see
            `stretto.optim.learning_rates`.
        model: The model, to find its normalisation layers. If None, only the number of dimensions
            of a parameter decides whether it decays.
        norms: The norm function of LARS and LAMB.
        peak_lr: The peak rate, `LearningRateSchedule.lr`; ``config.lr`` when None.
    """
    peak = config.lr if peak_lr is None else peak_lr

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        all_parameters = list(parameters)
        groups = (
            [{"params": all_parameters}]
            if config.decay_all
            else split_by_decay(all_parameters, model)
        )
        return _build_optimizer(config, groups, peak, norms)

    return build


def build_stacked_optimizer(
    config: AnyOptimConfig,
    model: nn.Module,
    values: Mapping[str, nn.Parameter],
    *,
    peak_lr: float | None = None,
) -> LayerOptimizer:
    """Return the optimizer of ``config`` for W models at once, each updated on its own.

    Args:
        config: The ``[optim]`` table.
        model: One model of the same architecture, which decides which parameters decay.
        values: The stacked parameters by name, each of the shape [W, ...].
        peak_lr: The peak rate; ``config.lr`` when None.
    """
    no_decay_names = frozenset[str]() if config.decay_all else no_decay_parameter_names(model)
    groups: list[dict[str, Any]] = [
        {"params": [value for name, value in values.items() if name not in no_decay_names]},
        {
            "params": [value for name, value in values.items() if name in no_decay_names],
            **NO_DECAY_OPTIONS,
        },
    ]
    peak = config.lr if peak_lr is None else peak_lr
    optimizer = _build_optimizer(
        config, [group for group in groups if group["params"]], peak, local_norms
    )
    optimizer.is_stacked = True
    return optimizer


def _build_optimizer(
    config: AnyOptimConfig, groups: Parameters, peak_lr: float, norms: NormFunction
) -> LayerOptimizer:
    decay = config.weight_decay
    match config:
        case SGDConfig():
            return SGD(groups, peak_lr, momentum=momentum_of(config), weight_decay=decay)
        case LARSConfig():
            trust = TrustRatioOptions(config.trust, config.eps, config.ratio_decay, peak_lr)
            momentum = momentum_of(config)
            return LARS(
                groups, peak_lr, momentum=momentum, trust=trust, weight_decay=decay, norms=norms
            )
        case LAMBConfig():
            return LAMB(
                groups,
                peak_lr,
                moments=_adam_moments(config),
                weight_decay=decay,
                norm_limit=config.norm_limit,
                norms=norms,
            )
        case AdamConfig():
            return Adam(groups, peak_lr, moments=_adam_moments(config), weight_decay=decay)
        case AdamWConfig():
            return AdamW(groups, peak_lr, moments=_adam_moments(config), weight_decay=decay)


def _adam_moments(config: AdamFamilyConfig) -> Moments:
    return Moments(config.beta1, config.beta2, config.eps)

"""The optimizers PyTorch ships, as config tables."""

from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from stretto.config import Config


class _Rate(Config):
    """What every optimizer shares: the learning rate and how it moves."""

    lr: float = Field(default=0.1, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate grows linearly to ``lr``."""
    decay: Literal["constant", "cosine"] = "constant"
    """Whether the rate stays or falls to zero along half a cosine."""
    weight_decay: float = Field(default=0.0, ge=0)


class SGDConfig(_Rate):
    """The ``[optim]`` table whose ``kind`` is ``"sgd"``."""

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False


class AdamWConfig(_Rate):
    """The ``[optim]`` table whose ``kind`` is ``"adamw"``."""

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)


OptimConfig = Annotated[SGDConfig | AdamWConfig, Field(discriminator="kind")]


def make_optimizer(
    config: SGDConfig | AdamWConfig,
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return what builds the optimizer of ``config`` once the parameters are known."""
    if isinstance(config, SGDConfig):
        return lambda parameters: torch.optim.SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov and config.momentum > 0,
            weight_decay=config.weight_decay,
            foreach=True,
        )
    return lambda parameters: torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        foreach=True,
    )

"""Reference models, plain modules that have never heard of ranks."""

import threading
from typing import Annotated, assert_never

import torch
from pydantic import Field
from torch import nn

from stretto.model.cnn import CNN, CNNConfig
from stretto.model.custom import CustomConfig, build_custom
from stretto.model.gpt import GPT, GPTConfig
from stretto.model.loss import correct, per_sample_loss
from stretto.model.resnet import ResNet, ResNetConfig

AnyModelConfig = CNNConfig | ResNetConfig | GPTConfig | CustomConfig
ModelConfig = Annotated[AnyModelConfig, Field(discriminator="kind")]
"""The ``[model]`` table of a run file; ``kind`` says which."""

_ONE_AT_A_TIME = threading.Lock()
"""Ranks may be threads of one process, and weights are drawn from its one generator."""


def build_model(config: AnyModelConfig, seed: int) -> nn.Module:
    """Return the model on the CPU; its weights depend on ``config`` and ``seed`` alone.

    The global random number generator is left as it was.
    """
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed: that would reseed the generators of accelerators, too.
        torch.default_generator.manual_seed(seed)
        return _construct(config)


def _construct(config: AnyModelConfig) -> nn.Module:
    match config:
        case CNNConfig():
            return CNN(config)
        case ResNetConfig():
            return ResNet(config)
        case GPTConfig():
            return GPT(config)
        case CustomConfig():
            return build_custom(config)
        case _:
            assert_never(config)


__all__ = [
    "CNN",
    "GPT",
    "AnyModelConfig",
    "CNNConfig",
    "CustomConfig",
    "GPTConfig",
    "ModelConfig",
    "ResNet",
    "ResNetConfig",
    "build_model",
    "correct",
    "per_sample_loss",
]

"""Reference models, plain modules that have never heard of ranks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, assert_never

import torch
from pydantic import Field
from torch import nn

from stretto.model.alexnet import AlexNet, AlexNetConfig
from stretto.model.backbone import backbone_state, head_of
from stretto.model.cnn import CNN, CNNConfig
from stretto.model.custom import CustomConfig, build_custom
from stretto.model.gpt import GPT, GPTConfig
from stretto.model.library import LibraryConfig, build_library
from stretto.model.loss import correct, per_sample_loss
from stretto.model.resnet import ResNet, ResNetConfig
from stretto.model.vgg import VGG, VGGConfig

AnyModelConfig = (
    CNNConfig | ResNetConfig | AlexNetConfig | VGGConfig | GPTConfig | LibraryConfig | CustomConfig
)
ModelConfig = Annotated[AnyModelConfig, Field(discriminator="kind")]
"""The ``[model]`` table of a run file; ``kind`` says which."""

_DRAWING = threading.RLock()
"""Ranks may be threads of one process, and weights are drawn from its one generator."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from ``seed`` inside; the global generator is left as it was, and no thread disturbs."""
    with _DRAWING, torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the generators of accelerators, too.
        torch.default_generator.manual_seed(seed)
        yield


def build_model(config: AnyModelConfig, seed: int) -> nn.Module:
    """Return the model on the CPU; its weights depend on ``config`` and ``seed`` alone.

    The global random number generator is left as it was.
    """
    with seeded(seed), torch.device("cpu"):
        return _construct(config)


def _construct(config: AnyModelConfig) -> nn.Module:
    model: nn.Module
    match config:
        case CNNConfig():
            model = CNN(config)
        case ResNetConfig():
            model = ResNet(config)
        case AlexNetConfig():
            model = AlexNet(config)
        case VGGConfig():
            model = VGG(config)
        case GPTConfig():
            model = GPT(config)
        case LibraryConfig():
            model = build_library(config)
        case CustomConfig():
            model = build_custom(config)
        case _:
            assert_never(config)
    return model


__all__ = [
    "CNN",
    "GPT",
    "VGG",
    "AlexNet",
    "AlexNetConfig",
    "AnyModelConfig",
    "CNNConfig",
    "CustomConfig",
    "GPTConfig",
    "LibraryConfig",
    "ModelConfig",
    "ResNet",
    "ResNetConfig",
    "VGGConfig",
    "backbone_state",
    "build_model",
    "correct",
    "head_of",
    "per_sample_loss",
    "seeded",
]

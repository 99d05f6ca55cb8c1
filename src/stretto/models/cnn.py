"""A small convolutional net: the default model, which learns the generated shapes quickly.

Shape suffixes: B batch, C channels, H height, W width, K classes.
"""
# ruff: noqa: N803, N806 - shape suffixes

import itertools
import math
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from stretto.config import Config

Norm = Literal["none", "batch", "group"]


class CNNConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"cnn"``."""

    kind: Literal["cnn"] = "cnn"
    width: int = Field(default=16, ge=1)
    """Channels of the first block; each of the next two doubles them."""
    classes: int = Field(default=8, ge=2)
    """Length of the output."""
    channels: int = Field(default=3, ge=1)
    """Channels of the input images."""
    norm: Norm = "none"
    """Normalisation after each convolution. With "batch", n ranks do not give the same result as
    one, because each rank normalises its own samples."""


class CNN(nn.Module):
    """Three blocks of convolution and pooling, a global maximum pooling, and the head."""

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        widths = [config.channels, config.width, 2 * config.width, 4 * config.width]
        self.blocks = nn.Sequential(
            *(_block(i, o, config.norm) for i, o in itertools.pairwise(widths))
        )
        self.head = nn.Linear(widths[-1], config.classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, K] for images of any size of at least 8 by 8."""
        x_BCHW = self.blocks(x_BCHW)
        logits_BK: Tensor = self.head(x_BCHW.amax(dim=(2, 3)))
        return logits_BK


def _block(channels_in: int, channels_out: int, norm: Norm) -> nn.Sequential:
    conv = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=norm == "none")
    # Without normalisation, only the weights preserve the scale of activations through each ReLU.
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return nn.Sequential(conv, *_norm(channels_out, norm), nn.ReLU(), nn.MaxPool2d(2))


def _norm(channels: int, norm: Norm) -> list[nn.Module]:
    if norm == "batch":
        return [nn.BatchNorm2d(channels)]
    if norm == "group":
        return [nn.GroupNorm(math.gcd(channels, 8), channels)]
    return []

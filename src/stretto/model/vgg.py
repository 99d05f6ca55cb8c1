"""VGG nets, depths 11, 13, 16 and 19, with or without batch norms.

Simonyan and Zisserman, 2014 (arXiv:1409.1556): nothing but 3x3 convolutions, pooled five times,
then two large linear layers. Batch norms (Ioffe and Szegedy, 2015, arXiv:1502.03167) came later;
convolutions keep their biases beside them, as is usual for these nets.

Shape suffixes: B batch, C channels, H height, W width, K classes.
"""
# ruff: noqa: N803, N806 - shape suffixes

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from stretto.config import Config
from stretto.model.plain import check_square, draw_plain_

_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_WIDER = (1, 2, 4, 8, 8)
"""Channels of each stage, as multiples of the first one's."""


class VGGConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"vgg"``."""

    kind: Literal["vgg"] = "vgg"
    depth: Literal[11, 13, 16, 19] = 16
    """Layers with weights; the last three are linear."""
    classes: int = Field(default=8, ge=2)
    """Length of the output."""
    channels: int = Field(default=3, ge=1)
    """Channels of the input images."""
    size: int = Field(default=224, ge=32)
    """Pixels on a side of the images; the first linear layer is as long as they ask for."""
    norm: Literal["none", "batch"] = "none"
    """Normalisation after each convolution."""
    dropout: float = Field(default=0.5, ge=0, lt=1)
    """Share of activations dropped after each hidden linear layer while training."""
    width: int = Field(default=64, ge=1)
    """Channels of the first stage; those that follow have 2, 4, 8 and 8 times as many."""
    hidden: int = Field(default=4096, ge=1)
    """Length of the two hidden linear layers."""


class VGG(nn.Module):
    """Five stages of convolutions, each pooled, two hidden linear layers, one last one."""

    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        self._size = config.size
        channels, layers = config.channels, list[nn.Module]()
        for num_convolutions, wider in zip(_CONVOLUTIONS[config.depth], _WIDER, strict=True):
            for _ in range(num_convolutions):
                layers += _convolution(channels, wider * config.width, config.norm == "batch")
                channels = wider * config.width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Sequential(
            nn.Linear(channels * (config.size // 32) ** 2, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
        )
        self.head = nn.Linear(config.hidden, config.classes)
        draw_plain_(self)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, K] for images of the configured size."""
        check_square(x_BCHW, self._size)
        logits_BK: Tensor = self.head(self.hidden(self.features(x_BCHW).flatten(1)))
        return logits_BK


def _convolution(channels_in: int, channels_out: int, has_norm: bool) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1)
    return [conv, *([nn.BatchNorm2d(channels_out)] if has_norm else []), nn.ReLU()]

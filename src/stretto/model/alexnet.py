"""AlexNet in one tower, with the norm that lets it learn from large batches.

The five convolutions and the dropout before the two large linear layers are of Krizhevsky,
Sutskever and Hinton, 2012; one tower with 64, 192, 384, 256 and 256 channels is of Krizhevsky,
2014 (arXiv:1404.5997), here without its local response norms. The batch norm after the last
pooling, pool5, was added for batches of 65,536 by Jia et al., 2018 (arXiv:1807.11205).

Shape suffixes: B batch, C channels, H height, W width, K classes.
"""
# ruff: noqa: N803, N806 - shape suffixes

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from stretto.config import Config
from stretto.model.plain import check_square, draw_plain_


class AlexNetConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"alexnet"``."""

    kind: Literal["alexnet"] = "alexnet"
    classes: int = Field(default=8, ge=2)
    """Length of the output."""
    channels: int = Field(default=3, ge=1)
    """Channels of the input images."""
    size: int = Field(default=224, ge=63)
    """Pixels on a side of the images; the first linear layer is as long as they ask for."""
    norm: Literal["none", "pool5"] = "pool5"
    """Where a batch norm is: after the last pooling, or nowhere."""
    dropout: float = Field(default=0.5, ge=0, lt=1)
    """Share of activations dropped before each hidden linear layer while training."""
    width: int = Field(default=64, ge=1)
    """Channels of the first convolution; those that follow have 3, 6, 4 and 4 times as many."""
    hidden: int = Field(default=4096, ge=1)
    """Length of the two hidden linear layers."""


class AlexNet(nn.Module):
    """Five convolutions, three of them pooled, two hidden linear layers, one last one."""

    def __init__(self, config: AlexNetConfig) -> None:
        super().__init__()
        self._size = config.size
        width, last = config.width, 4 * config.width
        self.features = nn.Sequential(
            nn.Conv2d(config.channels, width, kernel_size=11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(width, 3 * width, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(3 * width, 6 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(6 * width, last, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(last, last, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            *([nn.BatchNorm2d(last)] if config.norm == "pool5" else []),
        )
        self.hidden = nn.Sequential(
            nn.Dropout(config.dropout),
            nn.Linear(last * _last_side(config.size) ** 2, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
        )
        self.head = nn.Linear(config.hidden, config.classes)
        draw_plain_(self)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, K] for images of the configured size."""
        check_square(x_BCHW, self._size)
        logits_BK: Tensor = self.head(self.hidden(self.features(x_BCHW).flatten(1)))
        return logits_BK


def _last_side(size: int) -> int:
    """Return the side of the last map: 6 for images of 224."""
    side = (size + 2 * 2 - 11) // 4 + 1
    for _pooling in range(3):
        side = (side - 3) // 2 + 1
    return side

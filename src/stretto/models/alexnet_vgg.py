"""AlexNet in one tower, and the VGG nets of depths 11, 13, 16 and 19.

AlexNet: the five convolutions and the dropout before the two large linear layers are from
Krizhevsky, Sutskever and Hinton, 2012. One tower with 64, 192, 384, 256 and 256 channels is from
Krizhevsky, 2014 (arXiv:1404.5997), here without its local response normalisation. The batch norm
after the last pooling, pool5, was added for batches of 65,536 by Jia et al., 2018
(arXiv:1807.11205).

VGG: Simonyan and Zisserman, 2014 (arXiv:1409.1556), has only 3x3 convolutions, five poolings and
two large linear layers. Batch norms (Ioffe and Szegedy, 2015, arXiv:1502.03167) came later. The
convolutions keep their biases beside them, as is usual for VGG.

Shape suffixes: B batch, C channels, H height, W width, K classes.
"""
# ruff: noqa: N803, N806 - shape suffixes

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from stretto.config import Config
from stretto.errors import ConfigError


def init_weights_(model: nn.Module) -> None:
    """Initialise every convolution and linear layer of ``model``.

    Convolutions preserve the scale of activations through each ReLU (He et al., 2015,
    arXiv:1502.01852). Linear layers are normal with standard deviation 0.01, as in Krizhevsky et
    al., 2012. Biases are zero.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def check_image_size(images: Tensor, size: int) -> None:
    """Raise `ConfigError` unless ``images`` [B, C, H, W] are ``size`` by ``size``.

    Otherwise the first linear layer would fail, with a less helpful message.
    """
    height, width = images.shape[-2:]
    if (height, width) != (size, size):
        raise ConfigError(
            f"images are {height} by {width}, model.size is {size}: set data.size={size}, or "
            f"model.size={height} where they are square"
        )


class AlexNetConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"alexnet"``."""

    kind: Literal["alexnet"] = "alexnet"
    classes: int = Field(default=8, ge=2)
    """Length of the output."""
    channels: int = Field(default=3, ge=1)
    """Channels of the input images."""
    size: int = Field(default=224, ge=63)
    """Height and width of the images in pixels; sets the size of the first linear layer."""
    norm: Literal["none", "pool5"] = "pool5"
    """Add a batch norm after the last pooling ("pool5"), or none."""
    dropout: float = Field(default=0.5, ge=0, lt=1)
    """Probability of dropout before each hidden linear layer."""
    width: int = Field(default=64, ge=1)
    """Channels of the first convolution; the others have 3, 6, 4 and 4 times as many."""
    hidden: int = Field(default=4096, ge=1)
    """Outputs of each of the two hidden linear layers."""


class AlexNet(nn.Module):
    """Five convolutions, three with pooling, two hidden linear layers, and the head."""

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
            nn.Linear(last * _last_feature_map_side(config.size) ** 2, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
        )
        self.head = nn.Linear(config.hidden, config.classes)
        init_weights_(self)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, K] for images of the configured size."""
        check_image_size(x_BCHW, self._size)
        logits_BK: Tensor = self.head(self.hidden(self.features(x_BCHW).flatten(1)))
        return logits_BK


def _last_feature_map_side(size: int) -> int:
    """Return height and width of the last feature map: 6 for images of 224."""
    side = (size + 2 * 2 - 11) // 4 + 1
    for _pooling in range(3):
        side = (side - 3) // 2 + 1
    return side


# --- VGG ---

_CONVOLUTIONS_PER_STAGE = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
_WIDTH_MULTIPLES = (1, 2, 4, 8, 8)
"""Channels of each stage, as multiples of those of the first stage."""


class VGGConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"vgg"``."""

    kind: Literal["vgg"] = "vgg"
    depth: Literal[11, 13, 16, 19] = 16
    """Number of layers with weights; the last three are linear."""
    classes: int = Field(default=8, ge=2)
    """Length of the output."""
    channels: int = Field(default=3, ge=1)
    """Channels of the input images."""
    size: int = Field(default=224, ge=32)
    """Height and width of the images in pixels; sets the size of the first linear layer."""
    norm: Literal["none", "batch"] = "none"
    """Normalisation after each convolution."""
    dropout: float = Field(default=0.5, ge=0, lt=1)
    """Probability of dropout after each hidden linear layer."""
    width: int = Field(default=64, ge=1)
    """Channels of the first stage; the others have 2, 4, 8 and 8 times as many."""
    hidden: int = Field(default=4096, ge=1)
    """Outputs of each of the two hidden linear layers."""


class VGG(nn.Module):
    """Five stages of convolutions with pooling, two hidden linear layers, and the head."""

    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        self._size = config.size
        channels, layers = config.channels, list[nn.Module]()
        for num_convolutions, multiple in zip(
            _CONVOLUTIONS_PER_STAGE[config.depth], _WIDTH_MULTIPLES, strict=True
        ):
            for _ in range(num_convolutions):
                layers += _convolution(channels, multiple * config.width, config.norm == "batch")
                channels = multiple * config.width
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
        init_weights_(self)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, K] for images of the configured size."""
        check_image_size(x_BCHW, self._size)
        logits_BK: Tensor = self.head(self.hidden(self.features(x_BCHW).flatten(1)))
        return logits_BK


def _convolution(channels_in: int, channels_out: int, has_norm: bool) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1)
    return [conv, *([nn.BatchNorm2d(channels_out)] if has_norm else []), nn.ReLU()]

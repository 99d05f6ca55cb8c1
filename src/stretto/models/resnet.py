"""Residual networks (ResNet) of depths 18, 34, 50 and 101.

He et al., 2016 (arXiv:1512.03385), in the form called v1.5: the stride of a bottleneck is in its
3x3 convolution. The scale of the last norm of each block starts at zero, so that a block starts as
the identity, and the head may start small (both Goyal et al., 2017, arXiv:1706.02677). Weights are
initialised after He et al., 2015 (arXiv:1502.01852).

Shape suffixes: B batch, C channels, H height, W width, K classes.
"""
# ruff: noqa: N803, N806 - shape suffixes

from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from stretto.config import Config

Stem = Literal["imagenet", "small"]
WeightInit = Literal["normal", "uniform"]

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_WITH_BOTTLENECKS = (50, 101)
_BOTTLENECK_EXPANSION = 4


class ResNetConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"resnet"``."""

    kind: Literal["resnet"] = "resnet"
    depth: Literal[18, 34, 50, 101] = 18
    """Number of layers with weights; 50 and 101 are made of bottleneck blocks."""
    classes: int = Field(default=8, ge=2)
    """Length of the output."""
    channels: int = Field(default=3, ge=1)
    """Channels of the input images."""
    stem: Stem = "small"
    """First layers: "imagenet" divides height and width by 4, "small" keeps them."""
    width: int = Field(default=64, ge=1)
    """Channels of the first stage; each of the next three doubles them."""
    zero_gamma: bool = True
    """Initialise the scale of the last norm of each block to zero, so that a block starts as its
    shortcut."""
    start: WeightInit = "normal"
    """Initialisation. "normal": Kaiming normal with fan-out for convolutions, PyTorch's default for
    the head. "uniform": Kaiming uniform with fan-in for convolutions and the head."""
    head_std: float | None = Field(default=None, gt=0)
    """Initialise the head as normal with this standard deviation, and its bias as zero. Not set: as
    ``start`` says."""
    norm_momentum: float = Field(default=0.1, gt=0, le=1)
    """Momentum of the batch norms: 0.1 keeps 0.9 of the running statistics in each step."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of the batch norms, added to the variance."""


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, global average pooling, and the head."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = _stem(config)
        has_bottlenecks = config.depth in _WITH_BOTTLENECKS
        channels, blocks = config.width, list[nn.Module]()
        for stage, num_blocks in enumerate(_BLOCKS[config.depth]):
            inner = config.width * 2**stage
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                branch = (_bottleneck if has_bottlenecks else _basic)(channels, inner, stride)
                out = inner * _BOTTLENECK_EXPANSION if has_bottlenecks else inner
                blocks.append(Residual(branch, _shortcut(channels, out, stride)))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, config.classes)
        _initialise_(self, config)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return logits [B, K]."""
        x_BCHW = self.blocks(self.stem(x_BCHW))
        logits_BK: Tensor = self.head(x_BCHW.mean(dim=(2, 3)))
        return logits_BK


class Residual(nn.Module):
    """A residual block: relu(shortcut(x) + branch(x))."""

    def __init__(self, branch: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the ReLU of the sum of branch and shortcut."""
        total: Tensor = self.branch(x) + self.shortcut(x)
        return total.relu()


def _stem(config: ResNetConfig) -> nn.Sequential:
    if config.stem == "small":
        return nn.Sequential(*_conv_norm(config.channels, config.width, 3, 1), nn.ReLU())
    return nn.Sequential(
        *_conv_norm(config.channels, config.width, 7, 2),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


def _basic(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_conv_norm(channels_in, channels_out, 3, stride),
        nn.ReLU(),
        *_conv_norm(channels_out, channels_out, 3, 1),
    )


def _bottleneck(channels_in: int, inner: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *_conv_norm(channels_in, inner, 1, 1),
        nn.ReLU(),
        *_conv_norm(inner, inner, 3, stride),
        nn.ReLU(),
        *_conv_norm(inner, inner * _BOTTLENECK_EXPANSION, 1, 1),
    )


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(*_conv_norm(channels_in, channels_out, 1, stride))


def _conv_norm(channels_in: int, channels_out: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(channels_out)]


def _init_normal_(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _init_uniform_(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")


_INITIALISERS: Mapping[WeightInit, Callable[[nn.Module], None]] = {
    "normal": _init_normal_,
    "uniform": _init_uniform_,
}


def _initialise_(model: ResNet, config: ResNetConfig) -> None:
    for module in model.modules():
        _INITIALISERS[config.start](module)
        if isinstance(module, nn.BatchNorm2d):
            module.momentum, module.eps = config.norm_momentum, config.norm_eps
        elif isinstance(module, Residual) and config.zero_gamma:
            last_norm = module.branch[-1]
            assert isinstance(last_norm, nn.BatchNorm2d)
            nn.init.zeros_(last_norm.weight)
    if config.head_std is not None:
        nn.init.normal_(model.head.weight, std=config.head_std)
        nn.init.zeros_(model.head.bias)

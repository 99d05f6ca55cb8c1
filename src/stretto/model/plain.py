"""What plain convolutional nets share: no norm mends their scale, and one size of images fits."""

from torch import Tensor, nn

from stretto.errors import ConfigError


def draw_plain_(model: nn.Module) -> None:
    """Draw the weights of every convolution and linear layer of ``model`` anew.

    Convolutions keep the scale of activations through each ReLU (He et al., 2015,
    arXiv:1502.01852), linear layers are normal with deviation 0.01 as in Krizhevsky et al., 2012;
    biases begin at zero.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def check_square(images: Tensor, size: int) -> None:
    """Raise `ConfigError` unless ``images`` [B, C, H, W] are ``size`` by ``size``.

    A linear layer over all places would fail with less to go by.
    """
    height, width = images.shape[-2:]
    if (height, width) != (size, size):
        raise ConfigError(
            f"images are {height} by {width}, model.size is {size}: set data.size={size}, or "
            f"model.size={height} where they are square"
        )

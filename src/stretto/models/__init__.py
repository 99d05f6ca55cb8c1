"""Reference models, the ``[model]`` table that selects one, and per-sample loss and accuracy.

The models are plain PyTorch modules and contain nothing distributed.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, assert_never

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stretto.models.alexnet_vgg import VGG, AlexNet, AlexNetConfig, VGGConfig
from stretto.models.backbone import backbone_state, head_layer_names
from stretto.models.cnn import CNN, CNNConfig
from stretto.models.external import CustomConfig, LibraryConfig, build_custom, build_library
from stretto.models.gpt import GPT, GPTConfig
from stretto.models.resnet import ResNet, ResNetConfig

# Loss and accuracy are returned for each sample. Ranks may have unequal numbers of samples in a
# step, so a mean over each rank would give samples unequal weights.
# Shape suffixes: B batch, T tokens, V classes or vocabulary.


def per_sample_loss(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the cross entropy of each sample, [B].

    ``outputs`` are logits [B, V] with targets [B], or [B, T, V] with targets [B, T]; the loss is
    then the mean over T. 16-bit logits are converted to fp32 first, because sums of exponentials in
    16 bits would lose the last digits of the loss.

    ``smoothing`` moves this fraction of the target from the right class to all V classes evenly,
    the right one included. A paper that puts a mass eps on the V - 1 wrong classes only means
    ``smoothing = eps * V / (V - 1)``.
    """
    if outputs.dtype in (torch.bfloat16, torch.float16):
        outputs = outputs.float()
    losses = cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing
    )
    return _mean_per_sample(losses.view(targets.shape))


def per_sample_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the fraction of right answers in each sample, [B]; 0 or 1 for a single target."""
    return _mean_per_sample((outputs.argmax(dim=-1) == targets).float())


def _mean_per_sample(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(dim=1)


AnyModelConfig = (
    CNNConfig | ResNetConfig | AlexNetConfig | VGGConfig | GPTConfig | LibraryConfig | CustomConfig
)
ModelConfig = Annotated[AnyModelConfig, Field(discriminator="kind")]
"""The ``[model]`` table of a run file; ``kind`` selects the class."""

_RNG_LOCK = threading.RLock()
"""Guards the process's random number generator, because ranks may be threads of one process."""


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Seed the CPU generator inside, for one thread at a time, and restore it at the end."""
    with _RNG_LOCK, torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed the generators of accelerators.
        torch.default_generator.manual_seed(seed)
        yield


def build_model(config: AnyModelConfig, seed: int) -> nn.Module:
    """Return a new model on the CPU; its weights depend on ``config`` and ``seed`` alone.

    The state of the global random number generator is not changed.
    """
    with seeded_rng(seed), torch.device("cpu"):
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
    "head_layer_names",
    "per_sample_accuracy",
    "per_sample_loss",
    "seeded_rng",
]

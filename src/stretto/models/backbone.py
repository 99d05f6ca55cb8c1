"""Heads and backbones of models, and torchvision's names for the tensors of our ResNets."""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TypeVar

from torch import Tensor, nn

from stretto.errors import ConfigError
from stretto.models.alexnet_vgg import VGG, AlexNet
from stretto.models.cnn import CNN
from stretto.models.gpt import GPT
from stretto.models.resnet import ResNet

_HEAD_GETTERS = ("get_classifier", "get_output_embeddings")
"""Methods that return the head: of a model of timm, of a language model of transformers."""


def head_layer_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the last layers, whose size depends on the classes.

    In the models of this package, it is ``head``. Other models are asked by the methods of their
    library. If there are none, it is the last linear layer in the order of registration. The result
    is empty if there is no linear layer.
    """
    if isinstance(model, CNN | ResNet | AlexNet | VGG | GPT):
        return ("head",)
    last = _declared_head(model) or [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
    return tuple(name for name, module in model.named_modules() if any(module is m for m in last))


def backbone_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of ``model`` by name, without those of the head."""
    heads = head_layer_names(model)
    return {k: v for k, v in model.state_dict().items() if not belongs_to_layers(k, heads)}


def belongs_to_layers(name: str, layers: Collection[str]) -> bool:
    """Return whether the tensor ``name`` belongs to one of ``layers``."""
    return any(name.startswith(f"{layer}.") for layer in layers)


def _declared_head(model: nn.Module) -> list[nn.Module]:
    for getter_name in _HEAD_GETTERS:
        getter = getattr(model, getter_name, None)
        returned = getter() if callable(getter) else None
        candidates = returned if isinstance(returned, tuple | list) else [returned]
        # A model without classes returns None, or a layer without weights.
        layers = [
            m for m in candidates if isinstance(m, nn.Module) and any(True for _ in m.parameters())
        ]
        if layers:
            return layers
    return []


T = TypeVar("T")

_BLOCK_TENSOR_NAME = re.compile(r"layer(\d)\.(\d+)\.(conv|bn|downsample\.)(\d)\.(\w+)")
_TOP_LEVEL_MODULES = {"conv1": "stem.0", "bn1": "stem.1", "fc": "head"}


def has_torchvision_names(state: Mapping[str, object]) -> bool:
    """Return whether ``state`` looks like that of a ResNet of torchvision or timm."""
    return {"conv1.weight", "bn1.weight", "layer1.0.conv1.weight"} <= state.keys()


def from_torchvision(state: Mapping[str, T]) -> dict[str, T]:
    """Return the state of a ResNet of torchvision or timm, with the names of `ResNet`.

    Both libraries number blocks within each stage; ours are numbered through. The values are not
    copied.

    Raises:
        ConfigError: A name has no counterpart, because the network has another stem or blocks.
    """
    in_blocks = {name: found for name in state if (found := _BLOCK_TENSOR_NAME.fullmatch(name))}
    blocks = {(int(found[1]), int(found[2])) for found in in_blocks.values()}
    num_blocks = Counter(stage for stage, _ in blocks)
    named: dict[str, T] = {}
    for name, value in state.items():
        if name in in_blocks:
            stage, block, part, number, leaf = in_blocks[name].groups()
            before = sum(num_blocks[earlier] for earlier in range(1, int(stage)))
            inside = _block_layer_name(part, int(number))
            named[f"blocks.{before + int(block)}.{inside}.{leaf}"] = value
        else:
            named[f"{_top_level_module(name)}.{name.rpartition('.')[2]}"] = value
    return named


def _block_layer_name(part: str, number: int) -> str:
    """Return the name of a layer in its block; a branch repeats convolution, norm and ReLU."""
    if part == "downsample.":
        return f"shortcut.{number}"
    return f"branch.{3 * (number - 1) + (part == 'bn')}"


def _top_level_module(name: str) -> str:
    module = name.rpartition(".")[0]
    if module not in _TOP_LEVEL_MODULES:
        raise ConfigError(
            f"{name} is no tensor of a plain residual network: only resnet18, 34, 50 and 101 of "
            "torchvision and timm have the layers of ours"
        )
    return _TOP_LEVEL_MODULES[module]

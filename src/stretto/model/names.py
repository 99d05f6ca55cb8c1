"""Other libraries' names for the tensors of a model that we have too."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from stretto.errors import ConfigError

T = TypeVar("T")

_IN_A_BLOCK = re.compile(r"layer(\d)\.(\d+)\.(conv|bn|downsample\.)(\d)\.(\w+)")
_OUTSIDE = {"conv1": "stem.0", "bn1": "stem.1", "fc": "head"}


def has_torchvision_names(state: Mapping[str, object]) -> bool:
    """Return whether ``state`` looks like a residual network of torchvision or timm."""
    return {"conv1.weight", "bn1.weight", "layer1.0.conv1.weight"} <= state.keys()


def from_torchvision(state: Mapping[str, T]) -> dict[str, T]:
    """Return the state of a residual network of torchvision or timm under the names of ours.

    Both libraries number the blocks of each stage by themselves, ours run through; the values
    are those of ``state``, not copies.

    Raises:
        ConfigError: A name has no counterpart: the network has another stem or other blocks.
    """
    in_blocks = {name: found for name in state if (found := _IN_A_BLOCK.fullmatch(name))}
    blocks = {(int(found[1]), int(found[2])) for found in in_blocks.values()}
    num_blocks = Counter(stage for stage, _ in blocks)
    named: dict[str, T] = {}
    for name, value in state.items():
        if name in in_blocks:
            stage, block, part, number, leaf = in_blocks[name].groups()
            before = sum(num_blocks[earlier] for earlier in range(1, int(stage)))
            inside = _inside_block(part, int(number))
            named[f"blocks.{before + int(block)}.{inside}.{leaf}"] = value
        else:
            named[f"{_outside(name)}.{name.rpartition('.')[2]}"] = value
    return named


def _inside_block(part: str, number: int) -> str:
    """Return where a layer sits: convolution, norm and rectifier take turns in a branch."""
    if part == "downsample.":
        return f"shortcut.{number}"
    return f"branch.{3 * (number - 1) + (part == 'bn')}"


def _outside(name: str) -> str:
    module = name.rpartition(".")[0]
    if module not in _OUTSIDE:
        raise ConfigError(
            f"{name} is no tensor of a plain residual network: only torchvision's and timm's "
            "resnet18, 34, 50 and 101 have the layers of ours"
        )
    return _OUTSIDE[module]

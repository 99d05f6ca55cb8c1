"""The parameters of norms and the biases of the bundled models, stored in parameters.json.

``python -m tests.golden.parameters`` rewrites the file.
"""

import json
from pathlib import Path

import torch
from torch import nn

from stretto.models import (
    CNN,
    GPT,
    VGG,
    AlexNet,
    AlexNetConfig,
    CNNConfig,
    GPTConfig,
    ResNet,
    ResNetConfig,
    VGGConfig,
)

PATH = Path(__file__).with_name("parameters.json")

MODELS = {
    **{f"cnn {norm}": (CNN, CNNConfig(norm=norm)) for norm in ("none", "batch", "group")},
    **{f"resnet {depth}": (ResNet, ResNetConfig(depth=depth)) for depth in (18, 34, 50, 101)},
    "resnet 50 imagenet": (ResNet, ResNetConfig(depth=50, stem="imagenet")),
    **{f"alexnet {norm}": (AlexNet, AlexNetConfig(norm=norm)) for norm in ("none", "pool5")},
    **{f"vgg 16 {norm}": (VGG, VGGConfig(depth=16, norm=norm)) for norm in ("none", "batch")},
    "gpt": (GPT, GPTConfig()),
    "gpt tied": (GPT, GPTConfig(tied=True)),
}

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def build(label):
    """Return the model on the meta device: names, types and shapes, without values."""
    kind, config = MODELS[label]
    with torch.device("meta"):
        return kind(config)


def norms_and_biases(model):
    """Return the parameters of norm layers, and all others of at most one dimension."""
    of_norms = {
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if isinstance(module, _NORMS)
        for leaf, _ in module.named_parameters(recurse=False)
    }
    found = {"norms": [], "biases": []}
    for name, parameter in model.named_parameters():
        if name in of_norms:
            found["norms"].append(name)
        elif parameter.dim() <= 1:
            found["biases"].append(name)
    return found


if __name__ == "__main__":
    found = {label: norms_and_biases(build(label)) for label in MODELS}
    PATH.write_text(json.dumps(found, indent=1) + "\n")

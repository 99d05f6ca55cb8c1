"""A model without its last layer: what another task takes over from it."""

from collections.abc import Collection

from torch import Tensor, nn

from stretto.model.alexnet import AlexNet
from stretto.model.cnn import CNN
from stretto.model.gpt import GPT
from stretto.model.resnet import ResNet
from stretto.model.vgg import VGG

_ASKED = ("get_classifier", "get_output_embeddings")
"""What a model of timm, or a language model of transformers, calls its own answer."""


def head_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the last layers, those that know the classes.

    Our own models call theirs ``head``. Another model is asked, where its library has a word for
    it; else its last linear layer is taken, in the order in which layers were registered. Empty
    where there is none.
    """
    if isinstance(model, CNN | ResNet | AlexNet | VGG | GPT):
        return ("head",)
    last = _told(model) or [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
    return tuple(name for name, module in model.named_modules() if any(module is m for m in last))


def backbone_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of ``model`` by name, parameters and buffers, without its head's."""
    heads = head_of(model)
    return {k: v for k, v in model.state_dict().items() if not is_inside(k, heads)}


def is_inside(name: str, layers: Collection[str]) -> bool:
    """Return whether the tensor ``name`` belongs to one of ``layers``."""
    return any(name.startswith(f"{layer}.") for layer in layers)


def _told(model: nn.Module) -> list[nn.Module]:
    for word in _ASKED:
        ask = getattr(model, word, None)
        answer = ask() if callable(ask) else None
        told = answer if isinstance(answer, tuple | list) else [answer]
        # A model without classes answers with nothing, or with a layer that has no weights.
        layers = [m for m in told if isinstance(m, nn.Module) and any(True for _ in m.parameters())]
        if layers:
            return layers
    return []

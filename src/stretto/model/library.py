"""Models of timm, torchvision and transformers: built by their library, drawn here, not fetched.

A model keeps the names its library gives to tensors, and answers with logits alone: whatever else
a library returns beside them is dropped by a hook on the model itself.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Literal

from pydantic import Field, JsonValue, field_validator
from torch import Tensor, nn

from stretto.config import Config
from stretto.config.text import nearest
from stretto.errors import ConfigError, StrettoError

_FETCHING = {
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "weights",
    "weights_backbone",
}
"""Options by which a library would load weights; a run says that in ``[init]``."""


class LibraryConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"library"``."""

    kind: Literal["library"] = "library"
    name: str
    """``library:model``, as "timm:resnet50", "torchvision:resnet18" or "transformers:gpt2"."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the model; for transformers, of its config class."""
    classes: int | None = Field(default=None, ge=2)
    """Length of the output, of a language model its vocabulary; the library's own when not set."""

    @field_validator("name")
    @classmethod
    def _names_a_library(cls, name: str) -> str:
        library, colon, model = name.partition(":")
        if library not in BUILDERS or not colon or not model:
            known = ", ".join(f'"{known}:..."' for known in BUILDERS)
            raise ValueError(f"expected one of {known}{nearest(library, BUILDERS)}")
        return name

    @field_validator("options")
    @classmethod
    def _fetches_nothing(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if fetching := sorted(_FETCHING & options.keys()):
            raise ValueError(
                f"{fetching[0]} would load weights, and a model begins with fresh ones: name a "
                "file of weights in init.checkpoint"
            )
        return options


def build_library(config: LibraryConfig) -> nn.Module:
    """Return the named model with weights of its library's own drawing; nothing is downloaded.

    Raises:
        ConfigError: The library is not installed or broken, it has no such model, or the model
            cannot be built with the options.
    """
    library, _, name = config.name.partition(":")
    module = _imported(library, config)
    try:
        model = BUILDERS[library](module, name, config)
    except StrettoError:
        raise
    except Exception as failure:
        raise ConfigError(
            f"model.name = {config.name!r} with these model.options failed: {_reason(failure)}"
        ) from failure
    model.register_forward_hook(_logits)
    return model


def _imported(library: str, config: LibraryConfig) -> ModuleType:
    install = f'pip install "stretto[{library}]"'
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as missing:
        lacks = library if missing.name == library else f"{missing.name}, which {library} needs,"
        raise ConfigError(
            f"model.name = {config.name!r}: {lacks} is not installed: {install}"
        ) from None
    except Exception as failure:
        torch_version = importlib.metadata.version("torch")
        raise ConfigError(
            f"model.name = {config.name!r}: {library} is installed but cannot be imported: "
            f"{_reason(failure)}; it must be one made for torch {torch_version}: {install}"
        ) from failure


def _from_timm(timm: ModuleType, name: str, config: LibraryConfig) -> nn.Module:
    if not timm.is_model(name):
        raise _unknown(config, timm.list_models())
    options = _with_length(config, "num_classes")
    model: nn.Module = timm.create_model(name, pretrained=False, **options)
    return model


def _from_torchvision(torchvision: ModuleType, name: str, config: LibraryConfig) -> nn.Module:
    # Those of the module itself classify; others bring a backbone with weights to download.
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise _unknown(config, known)
    options = _with_length(config, "num_classes")
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model


def _from_transformers(transformers: ModuleType, name: str, config: LibraryConfig) -> nn.Module:
    if name not in transformers.CONFIG_MAPPING:
        raise _unknown(config, transformers.CONFIG_MAPPING.keys())
    plain = transformers.AutoConfig.for_model(name)
    for key in config.options:
        if not hasattr(plain, key):  # it would be kept and never read
            raise ConfigError(
                f"model.options.{key}: {config.name!r} has no such option"
                f"{nearest(key, (known for known in vars(plain) if known[0] != '_'))}"
            )
    if type(plain) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        # Training has no use for the keys and values of earlier tokens.
        options = {"use_cache": False} | _with_length(config, "vocab_size")
        builder = transformers.AutoModelForCausalLM
    elif type(plain) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        options = _with_length(config, "num_labels")
        builder = transformers.AutoModelForImageClassification
    else:
        raise ConfigError(
            f"model.name = {config.name!r} neither continues text nor classifies images; for "
            'another use write a function of your own: model.kind="custom"'
        )
    model: nn.Module = builder.from_config(transformers.AutoConfig.for_model(name, **options))
    return model


BUILDERS: Mapping[str, Callable[[ModuleType, str, LibraryConfig], nn.Module]] = {
    "timm": _from_timm,
    "torchvision": _from_torchvision,
    "transformers": _from_transformers,
}
"""How a model of each library is built, by what is imported."""


def _with_length(config: LibraryConfig, key: str) -> dict[str, JsonValue]:
    """Return the options with the length of the output under the library's word for it."""
    if config.classes is None:
        return config.options
    if config.options.get(key, config.classes) != config.classes:
        raise ConfigError(
            f"model.classes = {config.classes} and model.options.{key} = {config.options[key]} "
            "are one thing: leave one of them out"
        )
    return config.options | {key: config.classes}


def _unknown(config: LibraryConfig, known: Iterable[str]) -> ConfigError:
    library, _, name = config.name.partition(":")
    near = nearest(name, known)
    told = near or f"; {library} lists what it has"
    return ConfigError(f"model.name = {config.name!r}: {library} has no such model{told}")


def _logits(_model: nn.Module, _inputs: object, outputs: object) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f'model.kind = "library": the model answers with {type(outputs).__name__}, in which '
            "no logits are found"
        )
    return logits


def _reason(failure: Exception) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())

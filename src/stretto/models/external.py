"""Models from outside: a user's own function, or timm, torchvision and transformers.

A library model keeps the tensor names of its library. It has newly initialised weights; nothing is
downloaded. A hook on the model drops everything that the library returns beside the logits.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Literal

from pydantic import Field, JsonValue, field_validator
from torch import Tensor, nn

from stretto.config import Config
from stretto.config.formatting import did_you_mean
from stretto.errors import ConfigError, StrettoError


class CustomConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"custom"``."""

    kind: Literal["custom"] = "custom"
    target: str
    """``package.module:function``; the function returns a ``torch.nn.Module``."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""


def build_custom(config: CustomConfig) -> nn.Module:
    """Import the target, call it with the options, and return its model.

    Raises:
        ConfigError: The target cannot be imported, does not accept the options, fails, or returns
            no module.
    """
    function = _import_target(config.target)
    try:
        inspect.signature(function).bind(**config.options)
    except ValueError:
        pass  # the function has no signature: the call below reports a mismatch
    except TypeError as mismatch:
        raise ConfigError(
            f"model.options do not fit model.target = {config.target!r}: {mismatch}"
        ) from None
    try:
        model = function(**config.options)
    except Exception as failure:
        raise ConfigError(
            f"model.target = {config.target!r} failed: {type(failure).__name__}: {failure}"
        ) from failure
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.target = {config.target!r} returned {type(model).__name__}; "
            "it must return a torch.nn.Module"
        )
    return model


def _import_target(target: str) -> Callable[..., object]:
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute) or module_name.startswith("."):
        raise ConfigError(
            f'model.target = {target!r} names no function; write "package.module:function"'
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"model.target = {target!r}: no module {missing.name!r}; "
            "install it or put its folder on PYTHONPATH"
        ) from missing
    except AttributeError:
        raise ConfigError(
            f"model.target = {target!r}: module {module_name!r} has no {attribute!r}"
        ) from None
    if not callable(found):
        raise ConfigError(
            f"model.target = {target!r} is a {type(found).__name__}; "
            "it must be a function or class that can be called"
        )
    function: Callable[..., object] = found
    return function


_WEIGHT_LOADING_OPTIONS = {
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "weights",
    "weights_backbone",
}
"""Options with which a library would load weights; a run file does this in ``[init]``."""


class LibraryConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"library"``."""

    kind: Literal["library"] = "library"
    name: str
    """``library:model``, such as "timm:resnet50", "torchvision:resnet18" or "transformers:gpt2"."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the model; for transformers, of its config class."""
    classes: int | None = Field(default=None, ge=2)
    """Number of outputs; for a language model, the size of its vocabulary. Not set: the default of
    the library."""

    @field_validator("name")
    @classmethod
    def _names_a_library(cls, name: str) -> str:
        library, colon, model = name.partition(":")
        if library not in BUILDERS or not colon or not model:
            available = ", ".join(f'"{available}:..."' for available in BUILDERS)
            raise ValueError(f"expected one of {available}{did_you_mean(library, BUILDERS)}")
        return name

    @field_validator("options")
    @classmethod
    def _fetches_nothing(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if fetching := sorted(_WEIGHT_LOADING_OPTIONS & options.keys()):
            raise ValueError(
                f"{fetching[0]} would load weights, but a model is built with new ones: name a "
                "file of weights in init.checkpoint"
            )
        return options


def build_library(config: LibraryConfig) -> nn.Module:
    """Return the named model, initialised by its library; nothing is downloaded.

    Raises:
        ConfigError: The library is not installed or broken, it has no such model, or the model
            cannot be built with the options.
    """
    library, _, name = config.name.partition(":")
    module = _import_library(library, config)
    try:
        model = BUILDERS[library](module, name, config)
    except StrettoError:
        raise
    except Exception as failure:
        raise ConfigError(
            f"model.name = {config.name!r} with these model.options failed: "
            f"{_format_exception(failure)}"
        ) from failure
    model.register_forward_hook(_keep_logits_hook)
    return model


def _import_library(library: str, config: LibraryConfig) -> ModuleType:
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
            f"{_format_exception(failure)}; it must be one made for torch {torch_version}: "
            f"{install}"
        ) from failure


def _from_timm(timm: ModuleType, name: str, config: LibraryConfig) -> nn.Module:
    if not timm.is_model(name):
        raise _unknown_model_error(config, timm.list_models())
    options = _with_output_length(config, "num_classes")
    model: nn.Module = timm.create_model(name, pretrained=False, **options)
    return model


def _from_torchvision(torchvision: ModuleType, name: str, config: LibraryConfig) -> nn.Module:
    # Models of this module classify images; others would download weights for a backbone.
    available = torchvision.models.list_models(module=torchvision.models)
    if name not in available:
        raise _unknown_model_error(config, available)
    options = _with_output_length(config, "num_classes")
    model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    return model


def _from_transformers(transformers: ModuleType, name: str, config: LibraryConfig) -> nn.Module:
    if name not in transformers.CONFIG_MAPPING:
        raise _unknown_model_error(config, transformers.CONFIG_MAPPING.keys())
    plain = transformers.AutoConfig.for_model(name)
    for key in config.options:
        if not hasattr(plain, key):  # transformers would keep the option and never read it
            public_options = (option for option in vars(plain) if option[0] != "_")
            raise ConfigError(
                f"model.options.{key}: {config.name!r} has no such option"
                f"{did_you_mean(key, public_options)}"
            )
    if type(plain) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        # Training does not need the cache of keys and values of earlier tokens.
        options = {"use_cache": False} | _with_output_length(config, "vocab_size")
        builder = transformers.AutoModelForCausalLM
    elif type(plain) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        options = _with_output_length(config, "num_labels")
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
"""For each library, the function that builds a model, given the imported library."""


def _with_output_length(config: LibraryConfig, key: str) -> dict[str, JsonValue]:
    """Return the options with ``classes`` under ``key``, the library's name for it."""
    if config.classes is None:
        return config.options
    if config.options.get(key, config.classes) != config.classes:
        raise ConfigError(
            f"model.classes = {config.classes} and model.options.{key} = {config.options[key]} "
            "set the same number: leave one of them out"
        )
    return config.options | {key: config.classes}


def _unknown_model_error(config: LibraryConfig, available: Iterable[str]) -> ConfigError:
    library, _, name = config.name.partition(":")
    suggestion = did_you_mean(name, available)
    hint = suggestion or f"; {library} lists what it has"
    return ConfigError(f"model.name = {config.name!r}: {library} has no such model{hint}")


def _keep_logits_hook(_model: nn.Module, _inputs: object, outputs: object) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f'model.kind = "library": the model returns {type(outputs).__name__}, which has no '
            "logits"
        )
    return logits


def _format_exception(failure: Exception) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())

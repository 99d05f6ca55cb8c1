"""A model of the user's own: ``package.module:function``, imported and called."""

import importlib
import inspect
from collections.abc import Callable
from typing import Literal

from pydantic import Field, JsonValue
from torch import nn

from stretto.config import Config
from stretto.errors import ConfigError


class CustomConfig(Config):
    """The ``[model]`` table of a run whose ``kind`` is ``"custom"``."""

    kind: Literal["custom"] = "custom"
    target: str
    """``package.module:function``; the function returns a ``torch.nn.Module``."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""


def build_custom(config: CustomConfig) -> nn.Module:
    """Import the target, call it with the options and return its model."""
    function = _find(config.target)
    try:
        inspect.signature(function).bind(**config.options)
    except ValueError:
        pass  # no signature to compare with: the call will tell
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


def _find(target: str) -> Callable[..., object]:
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

"""Module and tensor hooks that report which unit's forward or backward runs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from stretto.planner.model_units import ModelUnit


class ExecutionListener(Protocol):
    """Callbacks of `ModuleHooks`."""

    def enter_forward(self, unit: int) -> None:
        """Called before a unit's forward runs."""
        ...

    def leave_forward(self, unit: int) -> None:
        """Called after a unit's forward has run."""
        ...

    def enter_backward(self, unit: int) -> None:
        """Called when the gradient of a unit's output is known, before its backward runs."""
        ...

    def on_gradient(self, unit: int, tensor: int) -> None:
        """Called when parameter ``tensor`` of a unit has accumulated its gradient."""
        ...


class ModuleHooks:
    """Sets all hooks of the sharded strategy on a model; `remove` removes them."""

    def __init__(self, units: Sequence[ModelUnit], listener: ExecutionListener) -> None:
        self._handles: list[RemovableHandle] = []
        self._wrapped: list[nn.Module] = []
        for index, unit in enumerate(units):
            for module in unit.modules:
                self._hook_forward(module, partial(listener.enter_forward, index))
                if not unit.always_active:
                    last = module is unit.modules[-1]
                    self._hook_forward_end(module, index, listener, last=last)
            for tensor, parameter in enumerate(unit.parameters):
                on_gradient = partial(listener.on_gradient, index, tensor)
                hook = parameter.register_post_accumulate_grad_hook(_ignore_argument(on_gradient))
                self._handles.append(hook)

    def _hook_forward(self, module: nn.Module, enter: Callable[[], None]) -> None:
        def before(_module: nn.Module, _inputs: object) -> None:
            enter()

        self._handles.append(module.register_forward_pre_hook(before))

    def _hook_forward_end(
        self, module: nn.Module, index: int, listener: ExecutionListener, *, last: bool
    ) -> None:
        enter = _ignore_argument(partial(listener.enter_backward, index))

        def after(_module: nn.Module, _inputs: object, outputs: object) -> None:
            if torch.is_grad_enabled():
                for output in tree_leaves(outputs):
                    if isinstance(output, Tensor) and output.requires_grad:
                        output.register_hook(enter)
            if last:
                listener.leave_forward(index)

        self._handles.append(module.register_forward_hook(after))

    def recompute(self, unit: ModelUnit) -> None:
        """Checkpoint the unit's modules: backward recomputes activations."""
        for module in unit.modules:
            module.forward = partial(_checkpointed, module.forward)
            self._wrapped.append(module)

    def remove(self) -> None:
        """Remove all hooks and checkpoint wrappers from the model."""
        for handle in self._handles:
            handle.remove()
        for module in self._wrapped:
            del module.forward
        self._handles, self._wrapped = [], []


def _checkpointed(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:  # noqa: ANN401
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    return checkpoint(forward, *args, use_reentrant=False, **named)


def _ignore_argument(call: Callable[[], None]) -> Callable[[Tensor], None]:
    def called(_tensor: Tensor) -> None:
        call()

    return called

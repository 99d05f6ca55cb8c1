"""Hooks that tell where a model's computation is: which unit's forward or backward begins."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from stretto.plan.units import ModelUnit


class Follower(Protocol):
    """Whoever follows the computation, unit by unit."""

    def enter_forward(self, unit: int) -> None:
        """A unit's forward is about to run."""
        ...

    def leave_forward(self, unit: int) -> None:
        """It has run."""
        ...

    def enter_backward(self, unit: int) -> None:
        """The gradient of its output is there: its backward is about to run."""
        ...

    def take_gradient(self, unit: int, tensor: int) -> None:
        """One of its parameters has the gradient of this backward."""
        ...


class Hooks:
    """Everything that hangs on a model; `remove` takes it all off."""

    def __init__(self, units: Sequence[ModelUnit], follower: Follower) -> None:
        self._handles: list[RemovableHandle] = []
        self._wrapped: list[nn.Module] = []
        for index, unit in enumerate(units):
            for module in unit.modules:
                self._watch(module, partial(follower.enter_forward, index))
                if not unit.spread:
                    last = module is unit.modules[-1]
                    self._watch_end(module, index, follower, last=last)
            for tensor, parameter in enumerate(unit.parameters):
                take = partial(follower.take_gradient, index, tensor)
                hook = parameter.register_post_accumulate_grad_hook(_without_argument(take))
                self._handles.append(hook)

    def _watch(self, module: nn.Module, enter: Callable[[], None]) -> None:
        def before(_module: nn.Module, _inputs: object) -> None:
            enter()

        self._handles.append(module.register_forward_pre_hook(before))

    def _watch_end(self, module: nn.Module, index: int, follower: Follower, *, last: bool) -> None:
        enter = _without_argument(partial(follower.enter_backward, index))

        def after(_module: nn.Module, _inputs: object, outputs: object) -> None:
            if torch.is_grad_enabled():
                for output in tree_leaves(outputs):
                    if isinstance(output, Tensor) and output.requires_grad:
                        output.register_hook(enter)
            if last:
                follower.leave_forward(index)

        self._handles.append(module.register_forward_hook(after))

    def recompute(self, unit: ModelUnit) -> None:
        """Let backward compute the unit's activations again instead of keeping them."""
        for module in unit.modules:
            module.forward = partial(_checkpointed, module.forward)
            self._wrapped.append(module)

    def remove(self) -> None:
        """Take everything off the model."""
        for handle in self._handles:
            handle.remove()
        for module in self._wrapped:
            del module.forward
        self._handles, self._wrapped = [], []


def _checkpointed(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:  # noqa: ANN401
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    return checkpoint(forward, *args, use_reentrant=False, **named)


def _without_argument(call: Callable[[], None]) -> Callable[[Tensor], None]:
    def called(_tensor: Tensor) -> None:
        call()

    return called

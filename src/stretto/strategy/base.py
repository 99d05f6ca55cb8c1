"""The contract between the training step and a strategy: how the ranks stay one model.

The moments, in the order the loop calls them (`stretto.train.loop` draws them in place)::

    model, optimizer = strategy.attach(model, make_optimizer)     once
    for every step:
        for every micro-batch:
            strategy.begin(step, micro, last_micro, lr)
            forward, backward                       hooks set in `attach` overlap communication
        strategy.after_backward()                   gradients are what the optimizer should see
        optimizer.step()
        strategy.after_update()                     parameters are what the next forward should see
    strategy.settle()                               before evaluation, checkpoint and shutdown
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Builds the optimizer once the strategy has the model in its final form."""


@dataclass(slots=True)
class Agreed:
    """What all ranks know of the step: its gradients, where `reads_gradients` kept them."""

    gradients: tuple[Tensor, ...] = ()
    updated_s: float = 0.0
    """How long updates took that were made beside the messages: compute, not communication."""
    waited_s: float = 0.0
    """How long forward and backward stood still for messages: communication, not compute."""
    done: bool = False
    """Whether updates are made as gradients arrive: there is nothing left to step."""
    apart: float | None = None
    """How far ranks' own models are from their mean, where that was measured and became known."""
    total_norm: Callable[[], Tensor] | None = None
    """Finds the norm where this rank has only some of the gradients; all ranks together."""
    _norm: Tensor | None = field(default=None, init=False, repr=False)

    def norm(self) -> Tensor:
        """Return the norm of all gradients together; not finite where one of them is not."""
        if self._norm is None:
            self._norm = self.total_norm() if self.total_norm else get_total_norm(self.gradients)
        return self._norm

    def clip_(self, most: float) -> None:
        """Scale gradients whose norm is larger down to ``most``, all of them together."""
        norm = self.norm()  # asked by all ranks, also by those without a gradient
        if self.gradients:
            factor = (most / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(self.gradients, factor.to(self.gradients[0].device))
            self._norm = None

    def divide_(self, scale: float) -> None:
        """Divide all of them by ``scale``, the factor that a loss was multiplied by."""
        if scale != 1 and self.gradients:
            torch._foreach_mul_(self.gradients, 1 / scale)
            self._norm = None


class Strategy(Protocol):
    """How the ranks stay one model; one rank is never a special case."""

    reads_gradients: bool
    """Somebody reads whole gradients before the update (clipping, loss scaling, own hooks), or the
    optimizer looks at all parameters at once; if not, a strategy may update as gradients arrive,
    at the rate the optimizer has when backward begins."""

    sound: Callable[[], bool]
    """Whether the step may change this rank's parameters; asked, from whichever thread, by a
    strategy that updates before `after_backward`."""

    own_models: bool
    """Whether each rank has a model of its own, that differs from the others'."""

    alone: bool
    """Whether a step is its rank's own affair: no other rank's model changes by its gradients. What
    is not finite then leaves one rank's step out, else that of all."""

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Take charge of ``model`` once; all ranks call it together and leave with equal models."""
        ...

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Announce a micro-batch before its gradients; they count once ``last_micro`` is set."""
        ...

    def after_backward(self, *, update: bool = True) -> Agreed:
        """Turn local gradients into those the optimizer should see; once a step.

        Without ``update`` the step is to be left out: no parameter may change.
        """
        ...

    def after_update(self) -> None:
        """Turn local parameters into those the next forward should see; once a step.

        Where ranks have models of their own, also after a step that was left out on this one.
        """
        ...

    def settle(self) -> None:
        """Drain what is in flight and make parameters and buffers whole and equal everywhere."""
        ...

    def apart(self) -> float | None:
        """Return how far ranks' own models are from the mean on which they are settled.

        As a share of its norm; None where they have none. All ranks together.
        """
        ...

    def unsettle(self) -> None:
        """Go on with parameters of this rank's own, where it has such; `begin` does so, too."""
        ...

    def close(self) -> None:
        """End threads; the channel is the caller's."""
        ...

    def whole_optimizer(self) -> Optimizer:
        """Return the optimizer as one rank would have it, on rank 0 at least; all together."""
        ...

    def take_optimizer(self, whole: Optimizer) -> None:
        """Take what ``whole``, got from `whole_optimizer`, remembers by now; equal on all ranks."""
        ...

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return what this rank has of the step's gradients, by name, last layers first."""
        ...

    def undoable(self) -> dict[str, Tensor]:
        """Return copies of what, of `own_state`, a step changes before it is known to count."""
        ...

    def own_state(self) -> dict[str, Tensor]:
        """Return copies of what this rank alone keeps from step to step; names as on all ranks."""
        ...

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Take it back; nothing, where it belonged to other ranks: all begin from one model."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beyond model and optimizer."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take it back."""
        ...

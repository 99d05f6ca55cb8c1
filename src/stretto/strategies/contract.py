"""The `Strategy` protocol: the calls that a training loop makes in every step.

The loop calls them in this order (`stretto.train.loop` shows them in place)::

    model, optimizer = strategy.attach(model, make_optimizer)     once
    for every step:
        for every micro-batch:
            strategy.begin(step, micro, last_micro, lr)
            forward, backward                       hooks set in `attach` overlap communication
        strategy.after_backward()                   gradients are ready for the optimizer
        optimizer.step()
        strategy.after_update()                     parameters are ready for the next forward
    strategy.consolidate()                          before evaluation, checkpoint and shutdown
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Builds the optimizer; the strategy calls it once the model has its final form."""


@dataclass(slots=True)
class StepGradients:
    """The step's reduced gradients, with times and measurements that belong to them."""

    gradients: tuple[Tensor, ...] = ()
    """Reduced gradients on this rank; empty if the strategy has already applied them."""
    updated_s: float = 0.0
    """Seconds spent in updates that overlapped communication: compute, not communication."""
    waited_s: float = 0.0
    """Seconds for which forward and backward waited for messages: communication, not compute."""
    is_applied: bool = False
    """Whether the strategy updates parameters as gradients arrive, so no step is left to make."""
    consensus_distance: float | None = None
    """Distance of the ranks' models from their mean; None unless a measurement has just ended."""
    total_norm: Callable[[], Tensor] | None = None
    """Computes the global norm where this rank holds only a shard of the gradients (collective)."""
    _norm: Tensor | None = field(default=None, init=False, repr=False)

    def norm(self) -> Tensor:
        """Return the norm of all gradients; it is not finite if any gradient is not."""
        if self._norm is None:
            self._norm = self.total_norm() if self.total_norm else get_total_norm(self.gradients)
        return self._norm

    def clip_(self, max_norm: float) -> None:
        """Scale all gradients by one factor so that their norm is at most ``max_norm``."""
        norm = self.norm()  # may be a collective: ranks without a gradient take part, too
        if self.gradients:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(self.gradients, factor.to(self.gradients[0].device))
            self._norm = None

    def divide_(self, scale: float) -> None:
        """Divide all gradients by ``scale``, the factor that the loss was multiplied by."""
        if scale != 1 and self.gradients:
            torch._foreach_mul_(self.gradients, 1 / scale)
            self._norm = None


class Strategy(Protocol):
    """Synchronises the replicas of a model; all methods work with any number of ranks, also one."""

    reads_gradients: bool
    """Whether all gradients must be complete before the update: for clipping, loss scaling, user
    hooks, or an optimizer that looks at all parameters. If not, a strategy may update parameters as
    gradients arrive, with the learning rate that the optimizer has when backward begins."""

    is_finite: Callable[[], bool]
    """Returns whether the step may change this rank's parameters. A strategy that updates before
    `after_backward` calls it, from any thread."""

    replicas_differ: bool
    """Whether the ranks' models differ between averages, as with gossip and local updates."""

    ranks_step_independently: bool
    """Whether a rank's gradients change the model of that rank only. If so, a gradient that is not
    finite makes that rank skip its step; otherwise all ranks skip it."""

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Broadcast and hook ``model``, once; return it and its optimizer (collective call)."""
        ...

    def begin(self, step: int, micro: int, last_micro: bool, lr: float) -> None:
        """Announce a micro-batch before its backward; ``last_micro`` completes the step."""
        ...

    def after_backward(self, *, update: bool = True) -> StepGradients:
        """Turn local gradients into the ones the optimizer should see; called once a step.

        With ``update=False`` the step is skipped: no parameter may change.
        """
        ...

    def after_update(self) -> None:
        """Turn local parameters into the ones the next forward should see; called once a step.

        Where replicas differ, it is also called after a step that this rank has skipped.
        """
        ...

    def consolidate(self) -> None:
        """Finish all communication; make parameters and buffers whole and equal on all ranks."""
        ...

    def consensus_distance(self) -> float | None:
        """Return the distance of the ranks' models from their mean, relative to the mean's norm.

        Collective; call it after `consolidate`. None if replicas do not differ.
        """
        ...

    def restore_local(self) -> None:
        """Put this rank's own parameters back after `consolidate`; `begin` does so, too."""
        ...

    def close(self) -> None:
        """End all threads of the strategy; the caller closes the transport."""
        ...

    def full_optimizer_state(self) -> Optimizer:
        """Return an unsharded optimizer; its state is complete on rank 0 at least (collective)."""
        ...

    def load_full_optimizer_state(self, full_optimizer: Optimizer) -> None:
        """Load the state of ``full_optimizer``, which `full_optimizer_state` returned.

        All ranks must pass the same state.
        """
        ...

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Return this rank's gradients of the step by parameter name, last layers first."""
        ...

    def rollback_state(self) -> dict[str, Tensor]:
        """Return copies of `local_state` entries that a step overwrites before it is accepted."""
        ...

    def local_state(self) -> dict[str, Tensor]:
        """Return copies of per-rank state that outlives a step; names are equal on all ranks."""
        ...

    def load_local_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `local_state` returned.

        An empty ``state`` resets it: the checkpoint came from other ranks, and all ranks start from
        one model.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beyond model and optimizer; equal on all ranks."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        ...

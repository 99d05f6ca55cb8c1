"""Models of many workers, stacked: a parameter of all of them is one tensor [P, ...].

A *party* is a model: that of one worker, of a group that shares one, or of all. Every worker has a
module of its own, whose parameters and gradients are rows of the stacks, and buffers (batch
statistics) of its own. So forward and backward are the module's, whatever it is, while updates and
rounds are single operations on all parties.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.optim.rules import across


@dataclass(frozen=True, slots=True)
class Rows:
    """Values of some parties, with their gradients: what one optimizer updates."""

    values: dict[str, nn.Parameter]
    """[P, ...] by name, of what is trained."""

    def clear_gradients(self) -> None:
        """Begin a step: backward adds to what is there."""
        torch._foreach_zero_([_grad(value) for value in self.values.values()])

    @torch.no_grad()
    def clip_gradients_(self, limit: float) -> None:
        """Scale down the gradients of every party whose norm of all of them is above ``limit``."""
        rows = [_grad(value).flatten(1) for value in self.values.values()]
        norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows])
        factors = (limit / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for value in self.values.values():
            _grad(value).mul_(across(factors, value))

    def of(self, party: int) -> "Rows":
        """Return those of one party alone, [1, ...]: they are the same memory."""
        mine = slice(party, party + 1)
        values = {name: nn.Parameter(value.data[mine]) for name, value in self.values.items()}
        for name, value in values.items():
            value.grad = _grad(self.values[name])[mine]
        return Rows(values)


class Stack:
    """``workers`` copies of a model, of which each of ``parties`` has as many in a row."""

    def __init__(self, model: nn.Module, workers: int, parties: int) -> None:
        self.parties = parties
        self.party_of = [worker * parties // workers for worker in range(workers)]
        self.values: dict[str, nn.Parameter] = {}
        """[P, ...] by name, of what is trained."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                rows = parameter.detach().expand(parties, *parameter.shape).clone()
                self.values[name] = nn.Parameter(rows)
                self.values[name].grad = torch.zeros_like(rows)
        self.rows = Rows(self.values)
        self.modules = [self._worker(model, party) for party in self.party_of]

    @torch.no_grad()
    def means(self) -> dict[str, Tensor]:
        """Return the mean of all parties, by name."""
        return {
            name: value.detach().double().mean(dim=0).to(value.dtype)
            for name, value in self.values.items()
        }

    @torch.no_grad()
    def apart(self, means: dict[str, Tensor]) -> float:
        """Return by how much parties differ from ``means``, as a share of their norm."""
        far = norm = 0.0
        for name, mean in means.items():
            wide = mean.double()
            far += float((self.values[name].double() - wide).square().sum())
            norm += float(wide.square().sum())
        return float((far / self.parties / norm) ** 0.5) if norm else 0.0

    def _worker(self, model: nn.Module, party: int) -> nn.Module:
        """Return a copy that looks into the party's row; what is not trained is shared by all."""
        shared = {id(p): p for p in model.parameters() if not p.requires_grad}
        module = copy.deepcopy(model, shared)
        for name, parameter in module.named_parameters():
            if name in self.values:
                stacked = self.values[name]
                parameter.data = stacked.data[party]
                parameter.grad = _grad(stacked)[party]
        return module


def put_means_(model: nn.Module, means: dict[str, Tensor], stack: Stack) -> None:
    """Make ``model`` that of ``means``, with the mean of workers' statistics.

    Like `stretto.strategy.buffers`: what cannot be averaged is the first worker's.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in means:
                parameter.copy_(means[name])
        others = [dict(module.named_buffers()) for module in stack.modules]
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                rows = torch.stack([of_worker[name].double() for of_worker in others])
                buffer.copy_(rows.mean(dim=0))
            else:
                buffer.copy_(others[0][name])


def _grad(value: Tensor) -> Tensor:
    assert value.grad is not None, "a stack's gradient is there from the beginning"
    return value.grad

"""Models of many workers, stacked: a parameter of all of them is one tensor [P, ...].

A *party* is a model: that of one worker, of a group that shares one, or of all. Every worker has a
module of its own, whose parameters and gradients are rows of the stacks, and buffers (batch
statistics) of its own. So forward and backward are the module's, whatever it is, while updates and
rounds are single operations on all parties.
"""

import copy

import torch
from torch import Tensor, nn

from stretto.optim.rules import across


class Stack:
    """``workers`` copies of a model, of which each of ``parties`` has as many in a row."""

    def __init__(self, model: nn.Module, workers: int, parties: int) -> None:
        self.parties = parties
        self.party_of = [worker * parties // workers for worker in range(workers)]
        self.values: dict[str, nn.Parameter] = {}
        """[P, ...] by name, of what is trained; the optimizer's parameters."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                rows = parameter.detach().expand(parties, *parameter.shape).clone()
                self.values[name] = nn.Parameter(rows)
                self.values[name].grad = torch.zeros_like(rows)
        self.modules = [self._worker(model, party) for party in self.party_of]

    def clear_gradients(self) -> None:
        """Begin a step: backward adds to what is there."""
        torch._foreach_zero_([_grad(value) for value in self.values.values()])

    def weigh_gradients_(self, factors: Tensor) -> None:
        """Multiply each party's gradients by its factor, of [P]."""
        for value in self.values.values():
            _grad(value).mul_(across(factors, value))

    def gradient_norms(self) -> Tensor:
        """Return the norm of all gradients of each party, [P]."""
        rows = [_grad(value).flatten(1) for value in self.values.values()]
        norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows])
        total: Tensor = torch.linalg.vector_norm(norms, dim=0)
        return total

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

"""The models of many workers, stacked: each parameter is one tensor [P, ...] for P replicas.

A replica is the model of one worker, of a group of workers, or of all workers. Every worker has
its own module. The parameters and gradients of the module are rows of the stacked tensors; its
buffers (batch statistics) are its own. Forward and backward therefore run on ordinary modules,
while an update or an averaging round is one operation on all replicas.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.optim.rules import unsqueeze_like


@dataclass(frozen=True, slots=True)
class StackedParameters:
    """Stacked parameters of some replicas, with gradients, that one optimizer updates."""

    values: dict[str, nn.Parameter]
    """Trainable parameters by name, each [P, ...]."""

    def clear_gradients(self) -> None:
        """Set all gradients to zero in place; backward adds to them."""
        torch._foreach_zero_([_grad(value) for value in self.values.values()])

    @torch.no_grad()
    def clip_gradients_(self, limit: float) -> None:
        """Clip each replica's gradients to a total norm of ``limit``."""
        rows = [_grad(value).flatten(1) for value in self.values.values()]
        norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows])
        factors = (limit / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for value in self.values.values():
            _grad(value).mul_(unsqueeze_like(factors, value))

    def select(self, replica: int) -> "StackedParameters":
        """Return views [1, ...] of one replica's parameters and gradients; memory is shared."""
        selected = slice(replica, replica + 1)
        values = {name: nn.Parameter(value.data[selected]) for name, value in self.values.items()}
        for name, value in values.items():
            value.grad = _grad(self.values[name])[selected]
        return StackedParameters(values)


class StackedModels:
    """``workers`` modules that share ``num_replicas`` replicas, consecutive workers together."""

    def __init__(self, model: nn.Module, workers: int, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.replica_of = [worker * num_replicas // workers for worker in range(workers)]
        self.values: dict[str, nn.Parameter] = {}
        """Trainable parameters by name, each [P, ...]."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                rows = parameter.detach().expand(num_replicas, *parameter.shape).clone()
                self.values[name] = nn.Parameter(rows)
                self.values[name].grad = torch.zeros_like(rows)
        self.rows = StackedParameters(self.values)
        self.modules = [self._worker_module(model, replica) for replica in self.replica_of]

    @torch.no_grad()
    def means(self) -> dict[str, Tensor]:
        """Return the mean of all replicas, by parameter name."""
        return {
            name: value.detach().double().mean(dim=0).to(value.dtype)
            for name, value in self.values.items()
        }

    @torch.no_grad()
    def consensus_distance(self, means: dict[str, Tensor]) -> float:
        """Return the RMS distance of replicas from ``means``, relative to the norm of ``means``."""
        squared_distance = norm = 0.0
        for name, mean in means.items():
            mean64 = mean.double()
            squared_distance += float((self.values[name].double() - mean64).square().sum())
            norm += float(mean64.square().sum())
        return float((squared_distance / self.num_replicas / norm) ** 0.5) if norm else 0.0

    def _worker_module(self, model: nn.Module, replica: int) -> nn.Module:
        """Return a copy of ``model`` whose trainable parameters are views of row ``replica``.

        Frozen parameters are not copied: all workers share them.
        """
        shared = {id(p): p for p in model.parameters() if not p.requires_grad}
        module = copy.deepcopy(model, shared)
        for name, parameter in module.named_parameters():
            if name in self.values:
                stacked = self.values[name]
                parameter.data = stacked.data[replica]
                parameter.grad = _grad(stacked)[replica]
        return module


def copy_means_(model: nn.Module, means: dict[str, Tensor], stack: StackedModels) -> None:
    """Copy ``means`` into ``model``, and the mean over workers of the floating-point buffers.

    Integer buffers are copied from the first worker, as `stretto.strategies.local_state` does.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in means:
                parameter.copy_(means[name])
        worker_buffers = [dict(module.named_buffers()) for module in stack.modules]
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                rows = torch.stack([buffers[name].double() for buffers in worker_buffers])
                buffer.copy_(rows.mean(dim=0))
            else:
                buffer.copy_(worker_buffers[0][name])


def _grad(value: Tensor) -> Tensor:
    assert value.grad is not None, "a stacked parameter has a gradient from the start"
    return value.grad

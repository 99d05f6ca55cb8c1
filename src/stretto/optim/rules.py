"""Update rules as functions on lists of tensors, in place, without waiting for a device.

A rank passes its layers; virtual workers pass theirs stacked as [W, ...], since every rule works
element by element. Only `stretto.optim.ratios` looks at a layer as a whole.

Rates are numbers or tensors without dimensions; a tensor on a device stays there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.errors import ConfigError

Rate = float | Tensor
Tensors = list[Tensor] | tuple[Tensor, ...]
Order = Literal["inside", "outside"]


@dataclass(frozen=True, slots=True)
class Momentum:
    """How a step remembers those before it.

    Order "outside": u = m u + d, w = w - lr u: old gradients follow the rate of today. Order
    "inside": v = m v + lr d, w = w - v: they keep the rate at which they were seen.

    Raises:
        ConfigError: The settings cannot be together.
    """

    momentum: float = 0.9
    order: Order = "outside"
    nesterov: bool = False
    momentum_correction: bool = False
    """Multiply v by lr(t) / lr(t-1) first (Goyal et al. 2017, arXiv:1706.02677, remark 2): the
    order "inside" then equals "outside"."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum {self.momentum}: expected at least 0, below 1")
        if self.order not in ("inside", "outside"):
            raise ConfigError(f'momentum order {self.order!r}: expected "inside" or "outside"')
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov looks ahead along the momentum, which is 0: set momentum")
        if self.momentum_correction and (self.order == "outside" or not self.momentum):
            raise ConfigError(
                'momentum_correction mends momentum of the order "inside"; '
                + ("the momentum is 0" if not self.momentum else '"outside" needs none')
            )


def add_scaled_(targets: Tensors, sources: Tensors, factor: Rate) -> None:
    """Add ``factor`` times the sources to the targets."""
    if isinstance(factor, Tensor):  # as alpha it would have to come to the host
        torch._foreach_add_(targets, torch._foreach_mul(sources, factor))
    else:
        torch._foreach_add_(targets, sources, alpha=factor)


def decayed(gradients: Tensors, weights: Tensors, weight_decay: float) -> list[Tensor]:
    """Return g + weight_decay w as new tensors.

    The rate multiplies it like any gradient: decay follows the schedule once.
    """
    return list(torch._foreach_add(gradients, weights, alpha=weight_decay))


def momentum_step_(
    weights: Tensors,
    buffers: Tensors,
    directions: Tensors,
    lr: Rate,
    how: Momentum,
    last_rates: Sequence[Rate | None] = (),
) -> None:
    """Move weights along directions and what the buffers remember; directions stay as they are.

    At a rate of 0 nothing divides by it. "outside": the buffer takes the direction in, weights
    stay. "inside": the buffer only fades, and weights still move by it. "inside", corrected: the
    buffer is emptied, weights stay, and the next step begins anew.

    Args:
        weights: Changed.
        buffers: Changed; zeros before the first step.
        directions: What a plain step would go along.
        lr: The rate of this step.
        how: Order, Nesterov, correction.
        last_rates: Per layer the rate of its step before, None where there was none; read only
            where `momentum_correction` is set.
    """
    if how.order == "outside":
        torch._foreach_mul_(buffers, how.momentum)
        torch._foreach_add_(buffers, directions)
        steps: Tensors = buffers
        if how.nesterov:
            steps = torch._foreach_add(directions, buffers, alpha=how.momentum)
        add_scaled_(weights, steps, -lr)
        return
    torch._foreach_mul_(buffers, how.momentum)
    if how.momentum_correction:
        multiply_(buffers, [correction(lr, last) for last in last_rates])
    add_scaled_(buffers, directions, lr)
    if how.nesterov:
        add_scaled_(weights, directions, -lr)
        torch._foreach_add_(weights, buffers, alpha=-how.momentum)
    else:
        torch._foreach_sub_(weights, buffers)


def correction(lr: Rate, last: Rate | None) -> Rate:
    """Return lr / last; 1 where the last rate was 0 or there was none: nothing to carry over."""
    if isinstance(last, Tensor):
        return torch.where(last > 0, lr / last, 1.0)
    return lr / last if last else 1.0


def multiply_(layers: Tensors, factors: Sequence[Rate]) -> None:
    """Multiply each layer by its factor."""
    numbers = [factor for factor in factors if not isinstance(factor, Tensor)]
    if len(numbers) == len(factors):
        torch._foreach_mul_(layers, numbers)
    else:
        torch._foreach_mul_(layers, [torch.as_tensor(factor) for factor in factors])


def across(numbers: Rate, layer: Tensor) -> Rate:
    """Return a number for each worker, [W], so that it multiplies a layer [W, ...].

    One number for all stays as it is.
    """
    if isinstance(numbers, Tensor) and numbers.dim():
        return numbers.view(-1, *(1,) * (layer.dim() - 1))
    return numbers


@dataclass(frozen=True, slots=True)
class Moments:
    """How Adam and its kin remember gradients and their squares.

    Raises:
        ConfigError: A number is out of range.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: expected at least 0, below 1")
        if self.eps < 0:
            raise ConfigError(f"eps {self.eps}: expected at least 0")


def remember_(firsts: Tensors, seconds: Tensors, gradients: Tensors, how: Moments) -> None:
    """Take gradients into the running means of themselves and of their squares."""
    torch._foreach_lerp_(firsts, gradients, 1 - how.beta1)
    torch._foreach_mul_(seconds, how.beta2)
    torch._foreach_addcmul_(seconds, gradients, gradients, 1 - how.beta2)


def adam_directions(
    firsts: Tensors, seconds: Tensors, steps: Sequence[float], how: Moments
) -> list[Tensor]:
    """Return mean / (root of mean square + eps), both freed of their start at zero.

    Args:
        firsts: Running means of gradients.
        seconds: Running means of their squares.
        steps: Per layer, how many gradients it has seen.
        how: The betas and eps.
    """
    below = torch._foreach_sqrt(seconds)
    torch._foreach_div_(below, [math.sqrt(1 - how.beta2**step) for step in steps])
    torch._foreach_add_(below, how.eps)
    directions = torch._foreach_div(firsts, [1 - how.beta1**step for step in steps])
    torch._foreach_div_(directions, below)
    return list(directions)


def shrink_(weights: Tensors, lr: Rate, weight_decay: float) -> None:
    """Multiply weights by 1 - lr weight_decay: decay apart from the gradient, as in AdamW."""
    kept = 1 - lr * weight_decay
    multiply_(weights, [kept] * len(weights))

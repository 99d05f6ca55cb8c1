"""Update rules as in-place functions on lists of tensors, which never wait for a device.

There are three kinds. *Update* rules step along gradients (momentum, Adam). *Combine* rules merge a
worker's values with those received from others (gossip, AD-PSGD, push-sum). *Outer* rules choose
where the next round of local steps begins (local SGD, SlowMo, DiLoCo, NoLoCo).

A rank passes its layers. Virtual workers pass layers stacked as [W, ...], with weights and masses
as [W]. Every rule works element by element; norms of whole layers are only used in
`stretto.optim.layer_optimizer`. Rates are numbers or 0-dimensional tensors, which stay on their
device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.errors import ConfigError

FloatOrTensor = float | Tensor
Tensors = list[Tensor] | tuple[Tensor, ...]
MomentumOrder = Literal["inside", "outside"]


@dataclass(frozen=True, slots=True)
class Momentum:
    """The settings of momentum.

    Order "outside": u = m u + d, w = w - lr u. Old gradients are scaled by the current rate.
    Order "inside": v = m v + lr d, w = w - v. Old gradients keep the rate of their own step.

    Raises:
        ConfigError: A number is out of range, or the settings contradict each other.
    """

    momentum: float = 0.9
    order: MomentumOrder = "outside"
    nesterov: bool = False
    momentum_correction: bool = False
    """Multiply v by lr(t) / lr(t-1) in each step (Goyal et al. 2017, arXiv:1706.02677, remark 2).
    The order "inside" then equals "outside"."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum {self.momentum}: expected at least 0, below 1")
        if self.order not in ("inside", "outside"):
            raise ConfigError(f'momentum order {self.order!r}: expected "inside" or "outside"')
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov looks ahead along the momentum, which is 0: set momentum")
        if self.momentum_correction and (self.order == "outside" or not self.momentum):
            raise ConfigError(
                'momentum_correction is only for momentum of the order "inside"; '
                + ("the momentum is 0" if not self.momentum else '"outside" needs none')
            )


def add_scaled_(targets: Tensors, sources: Tensors, factor: FloatOrTensor) -> None:
    """Add ``factor`` times the sources to the targets."""
    if isinstance(factor, Tensor):  # passed as alpha, it would be copied to the host
        torch._foreach_add_(targets, torch._foreach_mul(sources, factor))
    else:
        torch._foreach_add_(targets, sources, alpha=factor)


def add_weight_decay(gradients: Tensors, weights: Tensors, weight_decay: float) -> list[Tensor]:
    """Return g + weight_decay w as new tensors.

    The learning rate then multiplies the decay once, like any gradient.
    """
    return list(torch._foreach_add(gradients, weights, alpha=weight_decay))


def momentum_step_(
    weights: Tensors,
    buffers: Tensors,
    directions: Tensors,
    lr: FloatOrTensor,
    constants: Momentum,
    last_rates: Sequence[FloatOrTensor | None] = (),
) -> None:
    """Step the weights with momentum.

    A rate of 0 is allowed. "outside": the direction enters the buffer, and weights do not move.
    "inside": the buffer only decays, and weights still move by it. "inside" with correction: the
    buffer becomes 0, weights do not move, and the next step starts with an empty buffer.

    Args:
        weights: Changed in place.
        buffers: Momentum buffers, changed in place; zeros before the first step.
        directions: The directions of plain gradient descent; not changed.
        lr: The rate of this step.
        constants: The settings of the momentum.
        last_rates: For each layer, the rate of its previous step, None if there was none. Read only
            if ``constants.momentum_correction`` is set.
    """
    if constants.order == "outside":
        torch._foreach_mul_(buffers, constants.momentum)
        torch._foreach_add_(buffers, directions)
        steps: Tensors = buffers
        if constants.nesterov:
            steps = torch._foreach_add(directions, buffers, alpha=constants.momentum)
        add_scaled_(weights, steps, -lr)
        return
    torch._foreach_mul_(buffers, constants.momentum)
    if constants.momentum_correction:
        multiply_(buffers, [momentum_correction_factor(lr, last) for last in last_rates])
    add_scaled_(buffers, directions, lr)
    if constants.nesterov:
        add_scaled_(weights, directions, -lr)
        torch._foreach_add_(weights, buffers, alpha=-constants.momentum)
    else:
        torch._foreach_sub_(weights, buffers)


def momentum_correction_factor(lr: FloatOrTensor, last: FloatOrTensor | None) -> FloatOrTensor:
    """Return lr / last; 1 if the last rate was 0 or there was none, as the buffer is then 0."""
    if isinstance(last, Tensor):
        return torch.where(last > 0, lr / last, 1.0)
    return lr / last if last else 1.0


def multiply_(layers: Tensors, factors: Sequence[FloatOrTensor]) -> None:
    """Multiply each layer by its factor."""
    numbers = [factor for factor in factors if not isinstance(factor, Tensor)]
    if len(numbers) == len(factors):
        torch._foreach_mul_(layers, numbers)
    else:
        torch._foreach_mul_(layers, [torch.as_tensor(factor) for factor in factors])


def unsqueeze_like(numbers: FloatOrTensor, layer: Tensor) -> FloatOrTensor:
    """Return numbers [W] as a view that broadcasts against a layer [W, ...].

    A single number for all workers is returned as it is.
    """
    if isinstance(numbers, Tensor) and numbers.dim():
        return numbers.view(-1, *(1,) * (layer.dim() - 1))
    return numbers


@dataclass(frozen=True, slots=True)
class Moments:
    """The settings of the running means of Adam, AdamW and LAMB.

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


def update_moments_(
    first_moments: Tensors, second_moments: Tensors, gradients: Tensors, constants: Moments
) -> None:
    """Update the running means of the gradients and of their squares."""
    torch._foreach_lerp_(first_moments, gradients, 1 - constants.beta1)
    torch._foreach_mul_(second_moments, constants.beta2)
    torch._foreach_addcmul_(second_moments, gradients, gradients, 1 - constants.beta2)


def adam_directions(
    first_moments: Tensors, second_moments: Tensors, steps: Sequence[float], constants: Moments
) -> list[Tensor]:
    """Return Adam's directions: bias-corrected mean / (root of mean square + eps).

    Args:
        first_moments: Running means of the gradients.
        second_moments: Running means of their squares.
        steps: For each layer, the number of gradients in its means.
        constants: The betas and eps.
    """
    denominators = torch._foreach_sqrt(second_moments)
    torch._foreach_div_(denominators, [math.sqrt(1 - constants.beta2**step) for step in steps])
    torch._foreach_add_(denominators, constants.eps)
    directions = torch._foreach_div(first_moments, [1 - constants.beta1**step for step in steps])
    torch._foreach_div_(directions, denominators)
    return list(directions)


def decoupled_decay_(weights: Tensors, lr: FloatOrTensor, weight_decay: float) -> None:
    """Multiply weights by 1 - lr weight_decay: decoupled weight decay, as in AdamW."""
    shrinkage = 1 - lr * weight_decay
    multiply_(weights, [shrinkage] * len(weights))


# --- combine rules: merge a worker's values with received ones ---


def add_weighted_differences_(
    change: Tensor, sent: Tensor, received: Sequence[Tensor], weights: Sequence[FloatOrTensor]
) -> None:
    """Add the sum of weight * (received - sent) to ``change``.

    ``sent`` are this worker's values when it sent them, as old as the ``received`` ones. Its values
    may have changed since, so only the difference of the two counts. The mean over workers is thus
    preserved, however late messages are. If nothing has changed, the values plus ``change`` are the
    usual weighted average of gossip.
    """
    for peer_value, weight in zip(received, weights, strict=True):
        change += (peer_value - sent) * unsqueeze_like(weight, sent)


def average_pair_(one: Tensor, other: Tensor) -> None:
    """Overwrite both tensors with their mean: each moves half way towards the other.

    This is AD-PSGD (Lian et al., 2018, arXiv:1710.06952). Each worker can do its own part, given
    both values (`half_difference`). The two changes are then opposite to the last bit.
    """
    gap = half_difference(one, other)
    one += gap
    other -= gap


def half_difference(sent: Tensor, received: Tensor) -> Tensor:
    """Return half the difference of two workers' values, the step of the one that sent ``sent``."""
    return (received - sent) / 2


def merge_push_sum_(
    values: Tensors, mass: FloatOrTensor, received: Tensors, total_mass: FloatOrTensor
) -> None:
    """Merge received values into ``values``, weighted by mass.

    This is push-sum (Assran et al., 2019, arXiv:1811.10792). ``values`` are stored divided by mass.
    Received values have been multiplied by their mass by the sender.

    Args:
        values: This worker's values, changed in place.
        mass: The mass of ``values`` before the merge.
        received: The sum of the received values times their masses.
        total_mass: The mass after the merge: ``mass`` plus all received masses.
    """
    multiply_(values, [unsqueeze_like(mass / total_mass, value) for value in values])
    torch._foreach_add_(
        values, [message * unsqueeze_like(1 / total_mass, message) for message in received]
    )


# --- outer rules: where the next round of local steps begins ---
#
# A round of local steps begins at ``start_values``. The ``outer_gradient``, g below, is
# ``start_values`` minus the mean of the values at the end of the round, over all workers or a pair.
# It has the sign of a gradient. Every rule overwrites ``start_values``, x below, with the values at
# which the next round begins.


def outer_average_(start_values: Tensors, outer_gradient: Tensors) -> None:
    """Begin the next round at the mean: x = x - g.

    Local SGD, and post-local SGD after its switch point (Lin et al., 2018, arXiv:1808.07217).
    """
    torch._foreach_sub_(start_values, outer_gradient)


def outer_slowmo_(
    start_values: Tensors,
    momenta: Tensors,
    outer_gradient: Tensors,
    *,
    lr: float,
    alpha: float,
    beta: float,
) -> None:
    """Apply SlowMo (Wang et al., 2019, arXiv:1910.00643): u = beta u + g / lr, x = x - alpha lr u.

    ``lr`` is the rate of the local steps and ``momenta`` are u. If ``lr`` is 0, u only decays, and
    x = x - alpha g.
    """
    torch._foreach_mul_(momenta, beta)
    if not lr:
        torch._foreach_add_(start_values, outer_gradient, alpha=-alpha)
        return
    torch._foreach_add_(momenta, outer_gradient, alpha=1 / lr)
    torch._foreach_add_(start_values, momenta, alpha=-alpha * lr)


def outer_nesterov_(
    start_values: Tensors, momenta: Tensors, outer_gradient: Tensors, *, lr: float, momentum: float
) -> None:
    """Step with Nesterov momentum: m = momentum m + g, x = x - lr (g + momentum m).

    DiLoCo (Douillard et al., 2023, arXiv:2311.08105). ``lr`` is the outer rate, ``momenta`` are m.
    """
    constants = Momentum(momentum, nesterov=momentum > 0)
    momentum_step_(start_values, momenta, outer_gradient, lr, constants)


def outer_noloco_(
    start_values: Tensors, momenta: Tensors, outer_gradient: Tensors, *, lr: float, momentum: float
) -> None:
    """Step towards the mean of a pair of workers: m = momentum m - lr g, x = x + m.

    NoLoCo (Kolehmainen et al., 2025, arXiv:2506.10911). The paper has m = momentum m + lr D +
    lr (M - x). M is the pair's mean of x, which differs from worker to worker. D is the pair's mean
    of the change in the round. D + M is the pair's mean of the final values, so that only these
    need to be sent. ``momenta`` are m.
    """
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, outer_gradient, alpha=-lr)
    torch._foreach_add_(start_values, momenta)

"""The base class of our optimizers: fp32 master weights, per-layer state, norms and trust ratios.

All state is per parameter, step counts and last rates included. So `step` may be called several
times in one training step, each time with the gradients of other parameters.

Norms and ratios have the shape [W, L]: W workers (1 on a rank), L layers.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stretto.errors import ConfigError, StrettoError
from stretto.optim.rules import multiply_, unsqueeze_like

NormFunction = Callable[[Sequence[Tensor]], Tensor]
"""From L layers, each stacked over W workers as [W, ...], to their norms [W, L], float32 or wider.

LARS and LAMB call it once a step, with weights and gradients (or updates) together. So a function
that sums over shards, or averages over a group of ranks, needs only one message. All ranks that
share norms call it together, with equally many layers. It must not wait for a device."""


class NormSharing(NamedTuple):
    """A group of ranks that compute norms of their mean weights and gradients."""

    group_size: int
    """Number of consecutive ranks in a group."""
    from_step: int
    """The first step with shared norms, counted from 0."""


def local_norms(layers: Sequence[Tensor]) -> Tensor:
    """Return the norms [W, L] of unsharded layers [W, ...].

    Sums are made in the type of the layers, with at least 32 bits. On a CPU the error is 3e-5 of
    the norm for two million normal numbers, which is negligible in a ratio. With 64 bits the sums
    would take many times as long.
    """
    wide = [layer if layer.element_size() >= 4 else layer.float() for layer in layers]
    if len(wide[0]) == 1:
        return torch.stack(torch._foreach_norm(wide)).unsqueeze(0)
    rows = [layer.reshape(len(layer), layer[0].numel()) for layer in wide]
    return torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows], dim=1)


# --- trust ratios: the step of a layer, relative to the size of its weights ---
#
# A ratio is 1 if a norm is 0, because a layer that starts at zero must be able to move. A norm that
# is not finite gives an update that is not finite, on every rank alike, so that the finite check
# sees it. No layer is skipped on its own.


RatioDecay = Literal["plain", "peak"]


@dataclass(frozen=True, slots=True)
class TrustRatioOptions:
    """The constants of the trust ratio of LARS (You et al. 2017, arXiv:1708.03888).

    Raises:
        ConfigError: A number is out of range, or "peak" has no ``peak_lr``.
    """

    trust: float = 0.001
    """Eta: the step of a layer at a learning rate of 1, relative to the norm of its weights."""
    eps: float = 1e-8
    """Added to the denominator. It must be tiny: gradients late in training have norms around 1e-3,
    and a larger eps would silently slow down the layers with the smallest gradients."""
    ratio_decay: RatioDecay = "plain"
    """The decay in the denominator: "plain" is the weight decay, as in the paper. "peak" is peak_lr
    times the weight decay, as in Fujitsu's runs of 2019, whose decay had its own schedule."""
    peak_lr: float | None = None
    """The largest learning rate of the schedule; required by "peak"."""

    def __post_init__(self) -> None:
        if self.trust <= 0 or self.eps < 0:
            raise ConfigError(
                f"trust {self.trust}, eps {self.eps}: expected trust above 0, eps at least 0"
            )
        if self.ratio_decay not in ("plain", "peak"):
            raise ConfigError(f'ratio_decay {self.ratio_decay!r}: expected "plain" or "peak"')
        if self.ratio_decay == "peak" and self.peak_lr is None:
            raise ConfigError('ratio_decay "peak" needs peak_lr, the largest rate of the schedule')

    def denominator_decay(self, weight_decay: float) -> float:
        """Return the factor of |w| in the denominator of the ratio."""
        if self.ratio_decay == "plain":
            return weight_decay
        assert self.peak_lr is not None
        return self.peak_lr * weight_decay


def lars_ratio(
    weight_norms: Tensor, gradient_norms: Tensor, constants: TrustRatioOptions, weight_decay: float
) -> Tensor:
    """Return trust |w| / (|g| + decay |w| + eps)."""
    decay = constants.denominator_decay(weight_decay)
    ratio = constants.trust * weight_norms / (gradient_norms + decay * weight_norms + constants.eps)
    return _one_where_norm_is_zero(ratio, weight_norms, gradient_norms)


def lamb_ratio(
    weight_norms: Tensor, update_norms: Tensor, norm_limit: float | None = None
) -> Tensor:
    """Return min(|w|, ``norm_limit``) / |update| (arXiv:1904.00962)."""
    clamped = weight_norms.clamp(max=math.inf if norm_limit is None else norm_limit)
    return _one_where_norm_is_zero(clamped / update_norms, weight_norms, update_norms)


def scale_layers_(layers: list[Tensor], ratio: Tensor) -> None:
    """Multiply layer l of worker w by ``ratio[w, l]``; layers have the shape [W, ...].

    This is one multiplication for each layer. A flat buffer with the ratio of every element would
    need fewer kernels, but move three times the bytes. The 54 layers of ResNet-50, with decay, take
    0.7 to 1.0 ms against 1.8 ms on an H200, and 15 ms against 340 ms on two CPU cores.
    """
    columns = zip(ratio.unbind(1), layers, strict=True)
    multiply_(layers, [unsqueeze_like(column, layer) for column, layer in columns])


def _one_where_norm_is_zero(ratio: Tensor, *norms: Tensor) -> Tensor:
    for norm in norms:
        ratio = torch.where(norm == 0, 1.0, ratio)
    return ratio


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The parameters of one group that have gradients, with weights and state for the update."""

    options: dict[str, Any]
    parameters: list[Tensor]
    weights: list[Tensor]
    """The parameters themselves; for 16-bit parameters, their fp32 masters."""
    gradients: list[Tensor]
    """In the type of ``weights``."""
    states: list[dict[str, Any]]

    def state_tensors(self, key: str) -> list[Tensor]:
        """Return the state tensor ``key`` of each layer, created as zeros if it is missing."""
        for state, weight in zip(self.states, self.weights, strict=True):
            if key not in state:
                state[key] = torch.zeros_like(weight)
        return [state[key] for state in self.states]

    def count_step(self) -> list[float]:
        """Add one to the step count of each layer; return the counts."""
        for state in self.states:
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        steps = [state["step"] for state in self.states]
        torch._foreach_add_(steps, 1)
        counts: list[float] = torch.stack(steps).tolist()
        return counts

    def write_back_(self) -> None:
        """Copy the fp32 masters to their 16-bit parameters, rounded."""
        pairs = list(zip(self.parameters, self.weights, strict=True))
        rounded = [(p, master) for p, master in pairs if master is not p]
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [master for _, master in rounded])


class LayerOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose subclasses implement only `update_`, on lists of layers."""

    # torch wraps these methods for torch.compile. The first call of a wrapper imports the compiler,
    # which takes every rank 0.8 s at its start. So these are the methods inside the wrappers.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)

    is_stacked = False
    """Whether every parameter is [W, ...], with one row for each of W models."""

    def __init__(self, parameters: Any, options: dict[str, Any]) -> None:  # noqa: ANN401 - as torch
        lr = options["lr"]
        if not isinstance(lr, Tensor) and not 0 <= lr < float("inf"):
            raise ConfigError(f"lr {lr}: expected a number, at least 0")
        if not options["weight_decay"] >= 0:
            raise ConfigError(f"weight_decay {options['weight_decay']}: expected at least 0")
        super().__init__(parameters, options)

    @abstractmethod
    def update_(self, groups: Sequence[LayerGroup]) -> None:
        """Update the weights of every group; there is at least one group, and none is empty."""

    def with_model_dim(self, layers: Sequence[Tensor]) -> list[Tensor]:
        """Return views of the layers with the shape [W, ...]; W is 1 unless ``is_stacked``."""
        return list(layers) if self.is_stacked else [layer[None] for layer in layers]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch
        """Update the parameters that have gradients; gradients are not changed.

        Raises:
            StrettoError: A gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [_layer_group(group, self.state) for group in self.param_groups]
        groups = [group for group in groups if group.parameters]
        if groups:
            self.update_(groups)
        for group in groups:
            group.write_back_()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state bit for bit; torch's own method would round fp32 masters to 16 bits."""
        unwrap(torch.optim.Optimizer.load_state_dict)(self, state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        all_parameters = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(numbers, all_parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dtype != self.state[parameter][key].dtype:
                    self.state[parameter][key] = value.to(parameter.device, copy=True)


def _layer_group(group: dict[str, Any], state: Any) -> LayerGroup:  # noqa: ANN401 - torch's own mapping
    parameters = [p for p in group["params"] if p.grad is not None]
    states = [state[p] for p in parameters]
    weights = _weights_or_masters(parameters, states)
    gradients = [_cast_gradient(p.grad, w) for p, w in zip(parameters, weights, strict=True)]
    return LayerGroup(group, parameters, weights, gradients, states)


def _weights_or_masters(
    parameters: Sequence[Tensor], states: Sequence[dict[str, Any]]
) -> list[Tensor]:
    """Return the weights to update: fp32 masters for 16-bit parameters, else the parameters.

    Other code may load or average parameters between two steps and does not know the masters. So a
    master first adds the difference between its parameter and its own rounded value. If nobody
    changed the parameter, the difference is exactly 0.
    """
    weights = list(parameters)
    for index, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
        if parameter.element_size() > 2 or not parameter.is_floating_point():
            continue
        if "master" in state:
            rounded = state["master"].to(parameter.dtype)
            state["master"] += parameter.float() - rounded.float()
        else:
            state["master"] = parameter.float()
        weights[index] = state["master"]
    return weights


def _cast_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return ``gradient`` in the type of ``weight``; raise `StrettoError` if it is unsupported."""
    shape = list(weight.shape)
    if gradient.is_complex():
        raise StrettoError(
            f"the gradient of a parameter of shape {shape} is complex, which this optimizer does "
            "not support: store real and imaginary parts in a real parameter (torch.view_as_real)"
        )
    if gradient.layout != torch.strided:
        raise StrettoError(
            f"the gradient of a parameter of shape {shape} is sparse, which this optimizer does "
            "not support: build its layer with sparse=False"
        )
    return gradient.to(weight.dtype)

"""Estimate a model's cost per unit on a device that is not present, from a step on meta tensors.

An operation takes the longer of two times at given rates: that of its arithmetic, and that of the
bytes that it reads and writes. Saved activations and peak bytes are counted as in measurements
(`stretto.profiler.measure_units`). Attention is assumed to be fused where possible. A condition on
values that do not exist is assumed to be true: models typically ask whether they may skip work,
such as a mask that hides nothing.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from stretto.errors import ConfigError, StrettoError
from stretto.planner.model_units import ModelUnit, called_modules
from stretto.planner.profile import UnitCost
from stretto.profiler.measure_units import (
    SampleStep,
    build_unit_costs,
    count_saved,
    gradients_freed_at_once,
)
from stretto.profiler.unit_passes import MeteredStep, max_by_pass, sum_by_pass, unit_hooks

_ATEN = torch.ops.aten
_ATTENTION = "_scaled_dot_product_flash_attention"


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The peak rates of a device."""

    flops_per_s: float
    bytes_per_s: float
    """Memory bandwidth."""


DEVICE_RATES: Mapping[str, DeviceRates] = {
    "cpu": DeviceRates(flops_per_s=5e10, bytes_per_s=1e10),
    "h200": DeviceRates(flops_per_s=5e14, bytes_per_s=3.8e12),
    "h200 fp32": DeviceRates(flops_per_s=4.5e13, bytes_per_s=3.8e12),
}
"""Round figures. "cpu" is one core with wide vectors. The H200 reaches half of its 16-bit peak, 2/3
of its 32-bit peak, and 4/5 of its memory bandwidth."""


def parse_rates(text: str) -> DeviceRates:
    """Return the rates of a device in `DEVICE_RATES`, or of a text such as ``"3e14,2e12"``.

    The numbers are floating-point operations and bytes of memory per second.

    Raises:
        ConfigError: ``text`` is neither.
    """
    if text in DEVICE_RATES:
        return DEVICE_RATES[text]
    try:
        flops_per_s, bytes_per_s = (float(number) for number in text.split(","))
    except ValueError:
        flops_per_s = bytes_per_s = 0.0
    if not (flops_per_s > 0 and bytes_per_s > 0):
        raise ConfigError(
            f"--device {text}: to estimate, expected {', '.join(DEVICE_RATES)}, or operations and "
            "bytes of memory per second as 3e14,2e12"
        )
    return DeviceRates(flops_per_s, bytes_per_s)


@dataclass(frozen=True, slots=True)
class ModelToEstimate:
    """A model with its loss, a sample batch, and the function that finds its units."""

    model: nn.Module
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    """Returns the loss of a model on a batch."""
    batch: tuple[Tensor, ...]
    find: Callable[[nn.Module, Sequence[str]], list[ModelUnit]]
    """Returns the units of a model, given the names of the modules that its forward calls."""


def estimate_units(target: ModelToEstimate, rates: DeviceRates) -> list[UnitCost]:
    """Return the estimated cost of each unit; nothing is computed, and no memory is needed.

    Raises:
        ConfigError: The model does not run on meta tensors.
    """
    with _meta_errors_explained():
        return _estimate(target, rates)


def trace_units(target: ModelToEstimate) -> tuple[list[ModelUnit], tuple[str, ...]]:
    """Return the units of a meta copy of the model, and the modules that its forward calls.

    Raises:
        ConfigError: The model does not run on meta tensors.
    """
    with _meta_errors_explained():
        model = to_meta(target.model)
        batch = tuple(tensor.to("meta") for tensor in target.batch)
        with _MetaTensorMode(), torch.no_grad():
            calls = called_modules(model, lambda: target.loss(model, batch))
        return target.find(model, calls), calls


@contextmanager
def _meta_errors_explained() -> Iterator[None]:
    """Turn errors of a model on meta tensors into a `ConfigError` that explains them."""
    try:
        yield
    except StrettoError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"the model cannot be estimated: it does not run on meta tensors ({reason}); measure "
            "it instead, on the device it is for"
        ) from error


def _estimate(target: ModelToEstimate, rates: DeviceRates) -> list[UnitCost]:
    model = to_meta(target.model)
    batch = tuple(tensor.to("meta") for tensor in target.batch)
    sample = SampleStep(lambda: target.loss(model, batch), batch)
    with _MetaTensorMode():
        with torch.no_grad():
            calls = called_modules(model, sample.forward)
        units = target.find(model, calls)
        saved = count_saved(model, units, sample)
        time_meter, live_meter = _OperationTimeMeter(rates), _LiveResultMeter()
        step = MeteredStep(units, time_meter, live_meter)
        with (
            gradients_freed_at_once(units),
            unit_hooks(model, units, step.record),
            _OperationObserver(time_meter.observe, live_meter.observe),
        ):
            step.run(sample.forward)
    times = sum_by_pass(step.slots(), time_meter.intervals())
    return build_unit_costs(
        units, [times], saved, max_by_pass(step.slots(), live_meter.intervals())
    )


def to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` on the meta device; shared tensors stay shared."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers(), *_other_tensors(model)):
        if id(tensor) not in memo:
            memo[id(tensor)] = _empty_like(tensor)
    return copy.deepcopy(model, memo)


def _other_tensors(model: nn.Module) -> Iterable[Tensor]:
    """Yield tensor attributes that are neither parameters nor buffers."""
    values = (value for module in model.modules() for value in vars(module).values())
    return (value for value in values if isinstance(value, Tensor))


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


MAX_ANSWERS = 10_000
"""A forward that tests more values of meta tensors than this is taken for an endless loop."""


class _MetaTensorMode(TorchFunctionMode):
    """Makes meta tensors take the same path through a model as real ones.

    Attention becomes one fused operation that keeps no matrix of scores. A boolean tensor counts as
    true, up to a limit, so that a loop on such a condition ends with an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers_left = MAX_ANSWERS

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        keywords = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and not keywords.get("enable_gqa"):
            return _fused_attention(*args, **keywords)
        if func is Tensor.__bool__ and args[0].is_meta and args[0].dtype is torch.bool:
            return self._answer_true()
        return func(*args, **keywords)

    def _answer_true(self) -> bool:
        self._answers_left -= 1
        if self._answers_left < 0:
            raise RuntimeError("it tests the values of tensors without end")
        return True


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,  # noqa: ANN401 - dropout_p and is_causal
    **keywords: Any,  # noqa: ANN401 - other arguments of attention
) -> Tensor:
    """Return the result of fused attention; dropout is ignored, because its cost is negligible."""
    is_causal = rest[1] if len(rest) > 1 else keywords.get("is_causal", False)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    attended: Tensor = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query,
        key,
        value,
        0.0,
        is_causal,
        attn_mask=attn_mask,
        scale=keywords.get("scale"),
    )[0]
    return attended


class _Operation(NamedTuple):
    """An ATen operation that has run, with its arguments and result."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [v for v in tree_leaves((self.args, self.kwargs)) if isinstance(v, Tensor)]

    @property
    def new_tensors(self) -> list[Tensor]:
        """The tensors among its results that are not views of its inputs."""
        input_storages = {tensor.untyped_storage()._cdata for tensor in self.inputs}
        results = (value for value in tree_leaves(self.result) if isinstance(value, Tensor))
        return [t for t in results if t.untyped_storage()._cdata not in input_storages]


class _OperationObserver(TorchDispatchMode):
    """Passes every ATen operation to observers."""

    def __init__(self, *observe: Callable[[_Operation], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers = observe

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        operation = _Operation(func, args, kwargs or {}, func(*args, **(kwargs or {})))
        for observe in self._observers:
            observe(operation)
        return operation.result


class _OperationTimeMeter:
    """Adds up the estimated seconds of the operations in each interval."""

    def __init__(self, rates: DeviceRates) -> None:
        self._rates = rates

    def begin(self) -> None:
        self._seconds = [0.0]

    def record(self) -> None:
        self._seconds.append(0.0)

    def intervals(self) -> list[float]:
        return self._seconds[:-1]

    def observe(self, operation: _Operation) -> None:
        """Add the estimated seconds of ``operation``."""
        arithmetic_s = _flops(operation) / self._rates.flops_per_s
        moving_s = _moved_bytes(operation) / self._rates.bytes_per_s
        self._seconds[-1] += max(arithmetic_s, moving_s)


def _flops(operation: _Operation) -> float:
    packet = operation.func._overloadpacket
    name = packet.__name__
    if name.startswith(f"{_ATTENTION}_for_cpu"):  # has the formula of the GPU variant
        packet = getattr(_ATEN, name.replace("_for_cpu", ""))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    return float(formula(*operation.args, **operation.kwargs, out_val=operation.result))


def _moved_bytes(operation: _Operation) -> int:
    """Return the bytes that an operation reads and writes; 0 for a view."""
    new_tensors, changes = operation.new_tensors, operation.func._schema.is_mutable
    if not new_tensors and not changes:
        return 0
    written = new_tensors or [v for v in tree_leaves(operation.result) if isinstance(v, Tensor)]
    # An expanded tensor is read once, so its storage counts.
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*operation.inputs, *written))


class _LiveResultMeter:
    """Measures the peak live bytes of operations' results in each interval."""

    def begin(self) -> None:
        self._live = 0
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peaks = [0]

    def record(self) -> None:
        self._peaks.append(self._live)

    def intervals(self) -> list[float]:
        return [float(peak) for peak in self._peaks[:-1]]

    def observe(self, operation: _Operation) -> None:
        """Count the new tensors of ``operation`` until they are freed."""
        for tensor in operation.new_tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._refs:
                self._track(storage, storage.nbytes())

    def _track(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata

        def on_freed(_ref: object) -> None:
            del self._refs[key]
            self._live -= num_bytes

        self._refs[key] = weakref.ref(storage, on_freed)
        self._live += num_bytes
        self._peaks[-1] = max(self._peaks[-1], self._live)

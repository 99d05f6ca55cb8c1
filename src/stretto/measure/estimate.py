"""What a model would take on a device that is not here: its operations counted on meta tensors.

An operation takes as long as its arithmetic, or as the bytes that it reads and writes, whichever is
longer, at two stated rates. What autograd saves and what lives at once are counted as they are
measured (`stretto.measure.profile`). Attention is taken to be fused, where it can be. Who asks
whether something holds of numbers, which are not there, is told yes: models ask whether they may
leave something out, as a mask that hides nothing.
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
from stretto.measure.moments import Step, added_up, followed, largest_in
from stretto.measure.profile import Sample, count_saved, gradients_let_go, unit_costs
from stretto.plan.profile import UnitCost
from stretto.plan.units import ModelUnit, called_modules

_ATEN = torch.ops.aten
_ATTENTION = "_scaled_dot_product_flash_attention"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second, where nothing else holds it up."""

    flops_per_s: float
    bytes_per_s: float
    """Of its memory."""


RATES: Mapping[str, Rates] = {
    "cpu": Rates(flops_per_s=5e10, bytes_per_s=1e10),
    "h200": Rates(flops_per_s=5e14, bytes_per_s=3.8e12),
    "h200 fp32": Rates(flops_per_s=4.5e13, bytes_per_s=3.8e12),
}
"""Round figures: one core with wide vectors; half of the peak in 16 bits (of that in 32, 2/3), and
4/5 of the memory's."""


def parse_rates(text: str) -> Rates:
    """Return the rates of a named device, or those that are given as ``"3e14,2e12"``.

    Raises:
        ConfigError: It is neither.
    """
    if text in RATES:
        return RATES[text]
    try:
        flops_per_s, bytes_per_s = (float(word) for word in text.split(","))
    except ValueError:
        flops_per_s = bytes_per_s = 0.0
    if not (flops_per_s > 0 and bytes_per_s > 0):
        raise ConfigError(
            f"--device {text}: to estimate, expected {', '.join(RATES)}, or operations and bytes "
            "of memory in a second as 3e14,2e12"
        )
    return Rates(flops_per_s, bytes_per_s)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to be estimated, and how it is used."""

    model: nn.Module
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    """Of a model on a batch."""
    batch: tuple[Tensor, ...]
    find: Callable[[nn.Module, Sequence[str]], list[ModelUnit]]
    """From a model and the modules that its forward calls to its units."""


def estimate_units(subject: Subject, rates: Rates) -> list[UnitCost]:
    """Return what each unit takes; nothing is computed, and no memory is needed.

    Raises:
        ConfigError: The model cannot be run without numbers.
    """
    with _without_numbers():
        return _estimated(subject, rates)


def seen_units(subject: Subject) -> tuple[list[ModelUnit], tuple[str, ...]]:
    """Return the units of a copy on meta tensors, and the modules that its forward calls.

    Raises:
        ConfigError: The model cannot be run without numbers.
    """
    with _without_numbers():
        model = on_meta(subject.model)
        batch = tuple(tensor.to("meta") for tensor in subject.batch)
        with _AsOnDevice(), torch.no_grad():
            calls = called_modules(model, lambda: subject.loss(model, batch))
        return subject.find(model, calls), calls


@contextmanager
def _without_numbers() -> Iterator[None]:
    """Say in words what goes wrong where there are no numbers."""
    try:
        yield
    except StrettoError:
        raise
    except Exception as wrong:
        reason = f"{type(wrong).__name__}: {wrong}".splitlines()[0]
        raise ConfigError(
            "the model cannot be estimated: it does not run on tensors without numbers "
            f"({reason}); measure it instead, on the device it is for"
        ) from wrong


def _estimated(subject: Subject, rates: Rates) -> list[UnitCost]:
    model = on_meta(subject.model)
    batch = tuple(tensor.to("meta") for tensor in subject.batch)
    sample = Sample(lambda: subject.loss(model, batch), batch)
    with _AsOnDevice():
        with torch.no_grad():
            calls = called_modules(model, sample.forward)
        units = subject.find(model, calls)
        saved = count_saved(model, units, sample)
        counting, living = _Counting(rates), _Living()
        step = Step(units, counting, living)
        with (
            gradients_let_go(units),
            followed(model, units, step.note),
            _Watching(counting.see, living.see),
        ):
            step.run(sample.forward)
    times = added_up(step.slots(), counting.stretches())
    return unit_costs(units, [times], saved, largest_in(step.slots(), living.stretches()))


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` whose tensors have shapes only; those that are one stay one."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers(), *_attributes(model)):
        if id(tensor) not in memo:
            memo[id(tensor)] = _empty_like(tensor)
    return copy.deepcopy(model, memo)


def _attributes(model: nn.Module) -> Iterable[Tensor]:
    """Yield tensors that are neither parameters nor buffers."""
    values = (value for module in model.modules() for value in vars(module).values())
    return (value for value in values if isinstance(value, Tensor))


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


class _AsOnDevice(TorchFunctionMode):
    """Has tensors without numbers do what those on a device would.

    Attention is one operation that keeps no matrix of scores. Whoever asks whether something holds
    is told yes; a loop that goes on as long as it does is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers_left = 10_000

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        named = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and not named.get("enable_gqa"):
            return _fused(*args, **named)
        if func is Tensor.__bool__ and args[0].is_meta and args[0].dtype is torch.bool:
            return self._yes()
        return func(*args, **named)

    def _yes(self) -> bool:
        self._answers_left -= 1
        if self._answers_left < 0:
            raise RuntimeError("it asks for numbers without end")
        return True


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,  # noqa: ANN401 - dropout, and whether it is causal
    **named: Any,  # noqa: ANN401 - the rest of attention's own
) -> Tensor:
    """Return attention without dropout, which costs nothing here."""
    is_causal = rest[1] if len(rest) > 1 else named.get("is_causal", False)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    mixed: Tensor = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query,
        key,
        value,
        0.0,
        is_causal,
        attn_mask=attn_mask,
        scale=named.get("scale"),
    )[0]
    return mixed


class _Operation(NamedTuple):
    """One that has been carried out, and what it was given."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def read(self) -> list[Tensor]:
        """The tensors that it was given."""
        return [v for v in tree_leaves((self.args, self.kwargs)) if isinstance(v, Tensor)]

    @property
    def new(self) -> list[Tensor]:
        """Those among its results that are no other look at what it was given."""
        there = {tensor.untyped_storage()._cdata for tensor in self.read}
        results = (value for value in tree_leaves(self.result) if isinstance(value, Tensor))
        return [t for t in results if t.untyped_storage()._cdata not in there]


class _Watching(TorchDispatchMode):
    """Shows every operation to some who count."""

    def __init__(self, *see: Callable[[_Operation], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        operation = _Operation(func, args, kwargs or {}, func(*args, **(kwargs or {})))
        for see in self._see:
            see(operation)
        return operation.result


class _Counting:
    """Seconds of the operations in each stretch, at given rates."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    def begin(self) -> None:
        self._seconds = [0.0]

    def note(self) -> None:
        self._seconds.append(0.0)

    def stretches(self) -> list[float]:
        return self._seconds[:-1]

    def see(self, operation: _Operation) -> None:
        """Add what it takes."""
        arithmetic_s = _flops(operation) / self._rates.flops_per_s
        moving_s = _moved_bytes(operation) / self._rates.bytes_per_s
        self._seconds[-1] += max(arithmetic_s, moving_s)


def _flops(operation: _Operation) -> float:
    packet = operation.func._overloadpacket
    name = packet.__name__
    if name.startswith(f"{_ATTENTION}_for_cpu"):  # counted as the same on a GPU is
        packet = getattr(_ATEN, name.replace("_for_cpu", ""))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    return float(formula(*operation.args, **operation.kwargs, out_val=operation.result))


def _moved_bytes(operation: _Operation) -> int:
    """Return what an operation reads and writes; nothing where it looks at the same otherwise."""
    new, changes = operation.new, operation.func._schema.is_mutable
    if not new and not changes:
        return 0
    written = new or [v for v in tree_leaves(operation.result) if isinstance(v, Tensor)]
    # What is expanded is read once.
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*operation.read, *written))


class _Living:
    """The most bytes of operations' results that live in a stretch."""

    def begin(self) -> None:
        self._live = 0
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._most = [0]

    def note(self) -> None:
        self._most.append(self._live)

    def stretches(self) -> list[float]:
        return [float(most) for most in self._most[:-1]]

    def see(self, operation: _Operation) -> None:
        """Follow what it has made, until nobody has it."""
        for tensor in operation.new:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._refs:
                self._follow(storage, storage.nbytes())

    def _follow(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata

        def gone(_ref: object) -> None:
            del self._refs[key]
            self._live -= num_bytes

        self._refs[key] = weakref.ref(storage, gone)
        self._live += num_bytes
        self._most[-1] = max(self._most[-1], self._live)

"""Split a training step into intervals, and assign each to the forward or backward of a unit.

Hooks record events at the borders of units. Meters measure seconds or bytes in every interval
between two events. The events alone determine the owner of an interval. Time between two units
belongs to the next one, and the loss to the last unit's backward. So the intervals of all units add
up to the whole step.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from stretto.errors import ConfigError
from stretto.planner.model_units import ModelUnit


class StepEvent(Enum):
    """What happens between two intervals of a step."""

    FORWARD_BEGIN = auto()
    """A module of a unit is about to run."""
    FORWARD_END = auto()
    """A module of a unit has run."""
    MODEL_END = auto()
    """The whole model has run."""
    LOSS_END = auto()
    """The loss is computed; backward is about to begin."""
    BACKWARD_BEGIN = auto()
    """The gradient of a module's output is ready."""
    GRADIENT_READY = auto()
    """One of a unit's parameters has its gradient."""
    BACKWARD_END = auto()
    """Backward has ended."""


class UnitEvent(NamedTuple):
    """An event and its unit; -1 for events of the whole model."""

    kind: StepEvent
    unit: int = -1


class UnitPass(NamedTuple):
    """The forward or the backward of a unit."""

    unit: int
    backward: bool = False


class IntervalMeter(Protocol):
    """Measures something in every interval of a step."""

    def begin(self) -> None:
        """Start measuring a step; forget the one before."""
        ...

    def record(self) -> None:
        """End an interval and begin the next one."""
        ...

    def intervals(self) -> list[float]:
        """Return the values of all intervals; call it after the step."""
        ...


class MeteredStep:
    """Runs steps, records their events, and drives meters."""

    def __init__(self, units: Sequence[ModelUnit], *meters: IntervalMeter) -> None:
        self.events: list[UnitEvent] = []
        self._units, self._meters = units, meters
        self._in_backward = False

    def run(self, forward: Callable[[], Tensor]) -> None:
        """Run forward and backward; the units' gradients are cleared before.

        Raises:
            ConfigError: The loss depends on no trainable parameter.
        """
        self.clear_gradients()
        self.events, self._in_backward = [], False
        for meter in self._meters:
            meter.begin()
        loss = forward()
        if not loss.requires_grad:
            raise ConfigError(
                "the loss depends on no trainable parameter: there is no backward to measure"
            )
        self.record(UnitEvent(StepEvent.LOSS_END))
        self._in_backward = True
        loss.backward()
        self.record(UnitEvent(StepEvent.BACKWARD_END))

    def record(self, event: UnitEvent) -> None:
        """Record an event; forward events during backward (recomputation) are ignored."""
        if self._in_backward and event.kind in _FORWARD_EVENTS:
            return
        self.events.append(event)
        for meter in self._meters:
            meter.record()

    def slots(self) -> list[UnitPass]:
        """Return the unit pass that each interval of the last step belongs to."""
        return interval_owners(self.events, [unit.always_active for unit in self._units])

    def clear_gradients(self) -> None:
        """Free the gradients of all units."""
        for unit in self._units:
            for parameter in unit.parameters:
                parameter.grad = None


_FORWARD_EVENTS = (StepEvent.FORWARD_BEGIN, StepEvent.FORWARD_END, StepEvent.MODEL_END)


@contextmanager
def unit_hooks(
    model: nn.Module, units: Sequence[ModelUnit], record: Callable[[UnitEvent], None]
) -> Iterator[None]:
    """Record the events of the units of ``model`` with hooks, inside this context."""
    handles: list[RemovableHandle] = []
    for index, unit in enumerate(units):
        for module in unit.modules:
            handles += _hook_module(module, index, record, backward=not unit.always_active)
        record_gradient = partial(record, UnitEvent(StepEvent.GRADIENT_READY, index))
        for parameter in unit.parameters:
            handles.append(
                parameter.register_post_accumulate_grad_hook(_ignoring_arguments(record_gradient))
            )
    record_model_end = _ignoring_arguments(partial(record, UnitEvent(StepEvent.MODEL_END)))
    handles.append(model.register_forward_hook(record_model_end))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook_module(
    module: nn.Module, index: int, record: Callable[[UnitEvent], None], *, backward: bool
) -> list[RemovableHandle]:
    record_backward = _ignoring_arguments(
        partial(record, UnitEvent(StepEvent.BACKWARD_BEGIN, index))
    )

    def after(_module: nn.Module, _inputs: object, outputs: object) -> None:
        if backward and torch.is_grad_enabled():
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(record_backward)
        record(UnitEvent(StepEvent.FORWARD_END, index))

    before = _ignoring_arguments(partial(record, UnitEvent(StepEvent.FORWARD_BEGIN, index)))
    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _ignoring_arguments(call: Callable[[], None]) -> Callable[..., None]:
    def called(*_arguments: object) -> None:
        call()

    return called


def interval_owners(events: Sequence[UnitEvent], always_active: Sequence[bool]) -> list[UnitPass]:
    """Return the unit pass that the interval before each event belongs to.

    ``always_active`` marks the units whose modules enclose those of other units.
    """
    end = next(i for i, event in enumerate(events) if event.kind is StepEvent.LOSS_END)
    last = len(always_active) - 1
    forward = [UnitPass(unit) for unit in _forward_owners(events[:end], always_active)]
    backward = [UnitPass(unit, True) for unit in _backward_owners(events[end + 1 :], last)]
    return [*forward, UnitPass(last, True), *backward]


def _forward_owners(events: Sequence[UnitEvent], always_active: Sequence[bool]) -> Iterator[int]:
    before = UnitEvent(StepEvent.FORWARD_END, len(always_active) - 1)
    for event in events:
        owner = _running_unit(before, event, always_active)
        yield owner
        before = (
            event
            if event.kind is StepEvent.FORWARD_BEGIN
            else UnitEvent(StepEvent.FORWARD_END, owner)
        )


def _running_unit(before: UnitEvent, event: UnitEvent, always_active: Sequence[bool]) -> int:
    """Return the unit that ran between the events ``before`` and ``event`` of a forward.

    The module of an always active unit encloses those of others. The unit itself runs only while
    none of the others does.
    """
    if event.kind is StepEvent.FORWARD_BEGIN:
        is_inside = before.kind is StepEvent.FORWARD_BEGIN and not always_active[before.unit]
        return before.unit if is_inside else event.unit
    if event.kind is StepEvent.FORWARD_END:
        ran_alone = before == UnitEvent(StepEvent.FORWARD_BEGIN, event.unit)
        return event.unit if ran_alone or not always_active[event.unit] else before.unit
    return before.unit


def _backward_owners(events: Sequence[UnitEvent], last: int) -> Iterator[int]:
    """Yield the owner of the interval before each event of a backward.

    A unit owns the intervals until all its gradients are ready.
    """
    missing = Counter(event.unit for event in events if event.kind is StepEvent.GRADIENT_READY)
    owner = current = last
    for event in events:
        if event.kind is not StepEvent.BACKWARD_END:
            owner = current if missing[current] else event.unit
        yield owner
        if event.kind is StepEvent.GRADIENT_READY:
            missing[event.unit] -= 1
        elif event.kind is StepEvent.BACKWARD_BEGIN:
            current = event.unit


def sum_by_pass(slots: Sequence[UnitPass], intervals: Sequence[float]) -> Mapping[UnitPass, float]:
    """Return the sum of the intervals of each unit pass."""
    sums: dict[UnitPass, float] = {}
    for slot, value in zip(slots, intervals, strict=True):
        sums[slot] = sums.get(slot, 0.0) + value
    return sums


def max_by_pass(slots: Sequence[UnitPass], intervals: Sequence[float]) -> Mapping[UnitPass, float]:
    """Return the largest interval of each unit pass."""
    maxima: dict[UnitPass, float] = {}
    for slot, value in zip(slots, intervals, strict=True):
        maxima[slot] = max(maxima.get(slot, value), value)
    return maxima

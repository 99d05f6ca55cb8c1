"""Where a step is: moments at the borders of units, and whose the stretch before each one is.

Hooks note moments; a meter tells, for every stretch between two of them, seconds, bytes, or what
else it counts. Whose a stretch is follows from the moments alone. Between two units it is the next
one's; the loss is the last unit's backward. So units' stretches add up to the whole step.
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
from stretto.plan.units import ModelUnit


class Moment(Enum):
    """What happens at the border of two stretches."""

    FORWARD = auto()
    """A module of a unit is about to run."""
    FORWARD_OVER = auto()
    """It has run."""
    MODEL_OVER = auto()
    """The whole model has."""
    LOSS_OVER = auto()
    """The loss is there: backward is about to begin."""
    BACKWARD = auto()
    """The gradient of a module's output is there."""
    GRADIENT = auto()
    """One of a unit's parameters has its gradient."""
    OVER = auto()
    """Backward has ended."""


class Mark(NamedTuple):
    """A moment, and the unit it is of, where it is one's."""

    moment: Moment
    unit: int = -1


class Slot(NamedTuple):
    """The forward or the backward of a unit."""

    unit: int
    backward: bool = False


class Meter(Protocol):
    """Counts something along a step."""

    def begin(self) -> None:
        """A step is about to begin: forget what was before."""
        ...

    def note(self) -> None:
        """A stretch has ended."""
        ...

    def stretches(self) -> list[float]:
        """Return what was counted in each stretch; asked after the step."""
        ...


class Step:
    """Notes the moments of a step, and lets meters follow it."""

    def __init__(self, units: Sequence[ModelUnit], *meters: Meter) -> None:
        self.marks: list[Mark] = []
        self._units, self._meters = units, meters
        self._in_backward = False

    def run(self, forward: Callable[[], Tensor]) -> None:
        """Take a step without an update; gradients of units are gone before it.

        Raises:
            ConfigError: The loss depends on nothing that is trained.
        """
        self.forget_gradients()
        self.marks, self._in_backward = [], False
        for meter in self._meters:
            meter.begin()
        loss = forward()
        if not loss.requires_grad:
            raise ConfigError(
                "the loss depends on no trainable parameter: there is no backward to follow"
            )
        self.note(Mark(Moment.LOSS_OVER))
        self._in_backward = True
        loss.backward()
        self.note(Mark(Moment.OVER))

    def note(self, mark: Mark) -> None:
        """Note a moment; a forward that backward runs again is a part of backward."""
        if self._in_backward and mark.moment in _OF_FORWARD:
            return
        self.marks.append(mark)
        for meter in self._meters:
            meter.note()

    def slots(self) -> list[Slot]:
        """Return whose each stretch of the last step was."""
        return owners(self.marks, [unit.spread for unit in self._units])

    def forget_gradients(self) -> None:
        """Let the gradients of units go."""
        for unit in self._units:
            for parameter in unit.parameters:
                parameter.grad = None


_OF_FORWARD = (Moment.FORWARD, Moment.FORWARD_OVER, Moment.MODEL_OVER)


@contextmanager
def followed(
    model: nn.Module, units: Sequence[ModelUnit], note: Callable[[Mark], None]
) -> Iterator[None]:
    """Hang hooks on ``model`` that note the moments of its units; inside only."""
    handles: list[RemovableHandle] = []
    for index, unit in enumerate(units):
        for module in unit.modules:
            handles += _watch(module, index, note, backward=not unit.spread)
        taken = partial(note, Mark(Moment.GRADIENT, index))
        for parameter in unit.parameters:
            handles.append(parameter.register_post_accumulate_grad_hook(_ignoring(taken)))
    over = _ignoring(partial(note, Mark(Moment.MODEL_OVER)))
    handles.append(model.register_forward_hook(over))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(
    module: nn.Module, index: int, note: Callable[[Mark], None], *, backward: bool
) -> list[RemovableHandle]:
    begins = _ignoring(partial(note, Mark(Moment.BACKWARD, index)))

    def after(_module: nn.Module, _inputs: object, outputs: object) -> None:
        if backward and torch.is_grad_enabled():
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(begins)
        note(Mark(Moment.FORWARD_OVER, index))

    before = _ignoring(partial(note, Mark(Moment.FORWARD, index)))
    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _ignoring(call: Callable[[], None]) -> Callable[..., None]:
    def called(*_arguments: object) -> None:
        call()

    return called


def owners(marks: Sequence[Mark], spread: Sequence[bool]) -> list[Slot]:
    """Return whose the stretch before each mark is; ``spread`` says which units have no place."""
    end = next(i for i, mark in enumerate(marks) if mark.moment is Moment.LOSS_OVER)
    last = len(spread) - 1
    forward = [Slot(unit) for unit in _of_forward(marks[:end], spread)]
    backward = [Slot(unit, True) for unit in _of_backward(marks[end + 1 :], last)]
    return [*forward, Slot(last, True), *backward]


def _of_forward(marks: Sequence[Mark], spread: Sequence[bool]) -> Iterator[int]:
    before = Mark(Moment.FORWARD_OVER, len(spread) - 1)
    for mark in marks:
        owner = _running(before, mark, spread)
        yield owner
        before = mark if mark.moment is Moment.FORWARD else Mark(Moment.FORWARD_OVER, owner)


def _running(before: Mark, mark: Mark, spread: Sequence[bool]) -> int:
    """Return the unit that ran between two moments of a forward.

    A spread unit's module lies around those of others: it runs itself only where none of them does.
    """
    if mark.moment is Moment.FORWARD:
        inside = before.moment is Moment.FORWARD and not spread[before.unit]
        return before.unit if inside else mark.unit
    if mark.moment is Moment.FORWARD_OVER:
        alone = before == Mark(Moment.FORWARD, mark.unit)
        return mark.unit if alone or not spread[mark.unit] else before.unit
    return before.unit


def _of_backward(marks: Sequence[Mark], last: int) -> Iterator[int]:
    """Yield the unit before each moment of a backward: it runs until it has all its gradients."""
    missing = Counter(mark.unit for mark in marks if mark.moment is Moment.GRADIENT)
    owner = current = last
    for mark in marks:
        if mark.moment is not Moment.OVER:
            owner = current if missing[current] else mark.unit
        yield owner
        if mark.moment is Moment.GRADIENT:
            missing[mark.unit] -= 1
        elif mark.moment is Moment.BACKWARD:
            current = mark.unit


def added_up(slots: Sequence[Slot], stretches: Sequence[float]) -> Mapping[Slot, float]:
    """Return the sum of each slot's stretches."""
    sums: dict[Slot, float] = {}
    for slot, value in zip(slots, stretches, strict=True):
        sums[slot] = sums.get(slot, 0.0) + value
    return sums


def largest_in(slots: Sequence[Slot], stretches: Sequence[float]) -> Mapping[Slot, float]:
    """Return the largest of each slot's stretches."""
    most: dict[Slot, float] = {}
    for slot, value in zip(slots, stretches, strict=True):
        most[slot] = max(most.get(slot, value), value)
    return most

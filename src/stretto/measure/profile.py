"""What a model takes on the device it is on, unit by unit: seconds and bytes of real steps.

Steps are timed whole, and cut at the moments of `stretto.measure.moments`. Two more steps count
memory: what autograd saves is the unit's in whose forward it is saved, its own input included; the
most that lives in a slot beyond what has been saved by then is workspace. A gradient is let go as
soon as it is there, as a strategy does that takes it over: for that moment it is workspace, too.
"""

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from stretto.comm.channel import Channel
from stretto.comm.small import add_up_
from stretto.errors import ConfigError
from stretto.measure.interleave import spread
from stretto.measure.meters import Clock, CPUPeaks, GPUClock, GPUPeaks
from stretto.measure.moments import (
    Meter,
    Moment,
    Slot,
    Step,
    added_up,
    followed,
    largest_in,
)
from stretto.plan.profile import UnitCost
from stretto.plan.units import ModelUnit

_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """One rank's share of a step."""

    forward: Callable[[], Tensor]
    """Runs the model on the batch and returns the loss."""
    batch: tuple[Tensor, ...] = ()
    """What is there before and after: it is nobody's activation."""


def measure_units(
    model: nn.Module, units: Sequence[ModelUnit], sample: Sample, repeats: int = 9
) -> list[UnitCost]:
    """Return what each unit takes on this rank; buffers move on, parameters stay.

    Raises:
        ConfigError: There is nothing to repeat, or nothing to train.
    """
    if repeats < 1:
        raise ConfigError(f"{repeats} repeats: expected at least 1")
    on_gpu = units[0].parameters[0].is_cuda
    times = _timed(model, units, sample, repeats, on_gpu)
    saved = count_saved(model, units, sample)
    peaks = _peaks(model, units, sample, on_gpu)
    return unit_costs(units, times, saved, peaks)


def _timed(
    model: nn.Module, units: Sequence[ModelUnit], sample: Sample, repeats: int, on_gpu: bool
) -> list[Mapping[Slot, float]]:
    clock: Meter = GPUClock() if on_gpu else Clock()
    step, times = Step(units, clock), []
    with followed(model, units, step.note):
        for repeat in range(-_WARM_UP, repeats):
            step.run(sample.forward)
            if repeat >= 0:
                times.append(added_up(step.slots(), clock.stretches()))
    return times


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """What units leave for their backward."""

    activations: tuple[int, ...]
    inputs: tuple[int, ...]
    """What stays of it where backward computes the rest again: the inputs of its modules."""


class _Saving:
    """Bytes of storages that autograd begins to keep, each counted once, parameters never."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._before = {key: storage for tensor in known for key, storage in _storages(tensor)}

    def begin(self) -> None:
        self._kept = dict(self._before)
        self._bytes = [0]

    def note(self) -> None:
        self._bytes.append(0)

    def stretches(self) -> list[float]:
        return [float(num_bytes) for num_bytes in self._bytes[:-1]]

    def pack(self, tensor: Tensor) -> Tensor:
        """Count what is saved, and save it as it is."""
        for key, storage in _storages(tensor):
            if key not in self._kept:
                self._kept[key] = storage
                self._bytes[-1] += storage.nbytes()
        return tensor

    def new_bytes(self, values: object) -> int:
        """Return the bytes of the tensors among ``values`` that were not there before the step."""
        tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor))
        found = {key: storage for tensor in tensors for key, storage in _storages(tensor)}
        return sum(s.nbytes() for key, s in found.items() if key not in self._before)


def _storages(tensor: Tensor) -> list[tuple[int, torch.UntypedStorage]]:
    """Return a tensor's memory with what tells it from others, on the meta device as well."""
    if tensor.layout is not torch.strided:  # sparse ones have several, and no common name
        return []
    storage = tensor.untyped_storage()
    return [(storage._cdata, storage)]


def count_saved(model: nn.Module, units: Sequence[ModelUnit], sample: Sample) -> SavedBytes:
    """Return what each unit's forward keeps for backward, on any device; takes one step."""
    saving = _Saving([*model.parameters(), *model.buffers(), *sample.batch])
    step = Step(units, saving)
    inputs = [0] * len(units)
    with (
        followed(model, units, step.note),
        _inputs_seen(units, lambda unit, values: _add(inputs, unit, saving.new_bytes(values))),
        saved_tensors_hooks(saving.pack, lambda tensor: tensor),
    ):
        step.run(sample.forward)
    step.forget_gradients()
    end = 1 + next(i for i, m in enumerate(step.marks) if m.moment is Moment.LOSS_OVER)
    # The loss's own are kept until the last unit's backward.
    kept = [0] * len(units)
    for slot, num_bytes in zip(step.slots()[:end], saving.stretches()[:end], strict=True):
        kept[slot.unit] += int(num_bytes)
    return SavedBytes(tuple(kept), tuple(inputs))


def _add(sums: list[int], place: int, more: int) -> None:
    sums[place] += more


@contextmanager
def _inputs_seen(units: Sequence[ModelUnit], see: Callable[[int, object], None]) -> Iterator[None]:
    """Show what each module of a unit is first called with."""

    def watch(index: int) -> Callable[..., None]:
        seen: set[nn.Module] = set()

        def before(module: nn.Module, *values: object) -> None:
            if module not in seen:
                seen.add(module)
                see(index, values)

        return before

    handles = [
        module.register_forward_pre_hook(watch(index), with_kwargs=True)
        for index, unit in enumerate(units)
        for module in unit.modules
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _peaks(
    model: nn.Module, units: Sequence[ModelUnit], sample: Sample, on_gpu: bool
) -> Mapping[Slot, float]:
    """Return the most that lives in each slot above what was there before the step."""
    gc.collect()
    if on_gpu:
        meter = GPUPeaks()
        step = Step(units, meter)
        with gradients_let_go(units), followed(model, units, step.note):
            step.run(sample.forward)
        return largest_in(step.slots(), meter.stretches())
    with CPUPeaks() as counted:
        step = Step(units, counted)
        with gradients_let_go(units), followed(model, units, step.note):
            step.run(sample.forward)
    return largest_in(step.slots(), counted.stretches())


@contextmanager
def gradients_let_go(units: Sequence[ModelUnit]) -> Iterator[None]:
    """Let each gradient go once it is there; enter before `followed`, and no moment sees it."""

    def let_go(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(let_go)
        for unit in units
        for parameter in unit.parameters
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unit_costs(
    units: Sequence[ModelUnit],
    times: Sequence[Mapping[Slot, float]],
    saved: SavedBytes,
    peaks: Mapping[Slot, float],
) -> list[UnitCost]:
    """Put together what was counted; medians are stretched to the medians of the whole."""
    forward_s, backward_s = (_medians(times, len(units), backward=b) for b in (False, True))
    workspace = _workspace(peaks, saved.activations)
    return [
        UnitCost(
            name=unit.name,
            numel=unit.numel,
            forward_s=forward_s[index],
            backward_s=backward_s[index],
            spread=_spread(times, index),
            activation_bytes=saved.activations[index],
            input_bytes=saved.inputs[index],
            workspace_bytes=workspace[index],
            tensors=tuple(parameter.numel() for parameter in unit.parameters),
            used_often=unit.used_often,
        )
        for index, unit in enumerate(units)
    ]


def _medians(times: Sequence[Mapping[Slot, float]], count: int, *, backward: bool) -> list[float]:
    rows = [[step.get(Slot(unit, backward), 0.0) for unit in range(count)] for step in times]
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    # Medians add up to less than the median of sums: what disturbs a step is seldom the same.
    total_s = sum(middle)
    factor = statistics.median(map(sum, rows)) / total_s if total_s else 1.0
    return [factor * seconds for seconds in middle]


def _spread(times: Sequence[Mapping[Slot, float]], unit: int) -> float:
    both = [sum(step.get(Slot(unit, b), 0.0) for b in (False, True)) for step in times]
    return spread(both) if statistics.median(both) else 0.0


def _workspace(peaks: Mapping[Slot, float], activations: Sequence[int]) -> list[int]:
    """Return what a unit needs, forward or backward, beyond what units up to it have saved."""
    kept, found = 0, []
    for unit, saved in enumerate(activations):
        kept += saved
        most = max(peaks.get(Slot(unit, b), 0.0) for b in (False, True))
        found.append(max(0, round(most) - kept))
    return found


def measure_update(optimizer: Optimizer, repeats: int = 9) -> float:
    """Return the seconds of an update alone, made with small gradients; parameters move."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clock: Meter = GPUClock() if parameters[0].is_cuda else Clock()
    times = []
    for repeat in range(-_WARM_UP, repeats):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        clock.begin()
        optimizer.step()
        clock.note()
        if repeat >= 0:
            times.append(clock.stretches()[0])
    optimizer.zero_grad(set_to_none=True)
    return statistics.median(times)


def remembered_bytes(optimizer: Optimizer) -> int:
    """Return what an optimizer that has made an update remembers of one element, in bytes."""
    of_each = (
        sum(v.element_size() for v in state.values() if _is_like(v, parameter))
        for parameter, state in optimizer.state.items()
    )
    return max(of_each, default=0)


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def other_bytes(model: nn.Module, batch: Iterable[Tensor]) -> int:
    """Return what stays on a rank whatever is cut up: buffers, frozen parameters, the batch."""
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    kept = {key: s for t in (*frozen, *model.buffers(), *batch) for key, s in _storages(t)}
    return sum(storage.nbytes() for storage in kept.values())


_FIGURES = (
    "forward_s",
    "backward_s",
    "spread",
    "activation_bytes",
    "input_bytes",
    "workspace_bytes",
)
"""Of a unit, what ranks may find differently; seconds first."""


def slowest(costs: Sequence[UnitCost], channel: Channel) -> list[UnitCost]:
    """Return the largest of every figure over the ranks; all ranks together.

    Seconds are then shortened to those of the slowest rank's whole step: not every unit is slow on
    the same rank, and nobody is as slow as all of them.
    """
    places = torch.zeros(channel.size, len(costs), len(_FIGURES), dtype=torch.float64)
    mine = [[float(getattr(cost, figure)) for figure in _FIGURES] for cost in costs]
    places[channel.rank] = torch.tensor(mine, dtype=torch.float64)
    add_up_(places, channel)
    most = places.amax(dim=0)
    total_s = float(places[..., :2].sum(dim=(1, 2)).max())
    most[:, :2] *= total_s / max(float(most[:, :2].sum()), 1e-12)
    kinds = [type(getattr(costs[0], figure)) for figure in _FIGURES]
    rows = [zip(_FIGURES, kinds, row, strict=True) for row in most.tolist()]
    return [
        cost.model_copy(update={figure: kind(value) for figure, kind, value in row})
        for cost, row in zip(costs, rows, strict=True)
    ]

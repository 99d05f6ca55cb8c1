"""Measure a model's cost per unit on its device: seconds and bytes of real steps.

Whole steps are timed and split into intervals at the events of `stretto.profiler.unit_passes`. Two
more steps count memory. Tensors that autograd saves belong to the unit in whose forward they are
saved, the unit's input included. Workspace is the peak of a pass beyond all that has been saved by
then. Gradients are freed as soon as they are ready, as by a strategy that moves them to its own
buffers; until then they count as workspace.
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

from stretto.comm.transport import Transport, all_reduce_small_
from stretto.errors import ConfigError
from stretto.planner.model_units import ModelUnit
from stretto.planner.profile import UnitCost
from stretto.profiler.interleaved_timing import spread
from stretto.profiler.meters import CpuPeakMeter, CpuTimeMeter, GpuPeakMeter, GpuTimeMeter
from stretto.profiler.unit_passes import (
    IntervalMeter,
    MeteredStep,
    StepEvent,
    UnitPass,
    max_by_pass,
    sum_by_pass,
    unit_hooks,
)

_WARM_UP = 2
"""Untimed steps before the timed ones."""


@dataclass(frozen=True, slots=True)
class SampleStep:
    """The forward pass of one rank in a step."""

    forward: Callable[[], Tensor]
    """Runs the model on the batch and returns the loss."""
    batch: tuple[Tensor, ...] = ()
    """Input tensors, which exist before the step and count as no unit's activations."""


def measure_units(
    model: nn.Module, units: Sequence[ModelUnit], sample: SampleStep, repeats: int = 9
) -> list[UnitCost]:
    """Return the cost of each unit on this rank.

    Steps change the model's buffers, such as batch statistics, but not its parameters.

    Args:
        model: The model on its device.
        units: The units to measure, which hold all trainable parameters.
        sample: The forward pass.
        repeats: Timed steps; the medians count.

    Raises:
        ConfigError: ``repeats`` is below 1, or the loss depends on no trainable parameter.
    """
    if repeats < 1:
        raise ConfigError(f"{repeats} repeats: expected at least 1")
    on_gpu = units[0].parameters[0].is_cuda
    times = _time_passes(model, units, sample, repeats, on_gpu)
    saved = count_saved(model, units, sample)
    peaks = _peak_by_pass(model, units, sample, on_gpu)
    return build_unit_costs(units, times, saved, peaks)


def _time_passes(
    model: nn.Module, units: Sequence[ModelUnit], sample: SampleStep, repeats: int, on_gpu: bool
) -> list[Mapping[UnitPass, float]]:
    timer: IntervalMeter = GpuTimeMeter() if on_gpu else CpuTimeMeter()
    step, times = MeteredStep(units, timer), []
    with unit_hooks(model, units, step.record):
        for repeat in range(-_WARM_UP, repeats):
            step.run(sample.forward)
            if repeat >= 0:
                times.append(sum_by_pass(step.slots(), timer.intervals()))
    return times


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes that the units save for backward, one value for each unit."""

    activations: tuple[int, ...]
    """All saved bytes."""
    inputs: tuple[int, ...]
    """The bytes that remain with activation checkpointing: the inputs of the unit's modules."""


class _SavedTensorMeter:
    """Counts the bytes of storages that autograd saves, each once; ``existing`` ones never."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        self._before = {key: storage for tensor in existing for key, storage in _storages(tensor)}

    def begin(self) -> None:
        self._kept = dict(self._before)
        self._bytes = [0]

    def record(self) -> None:
        self._bytes.append(0)

    def intervals(self) -> list[float]:
        return [float(num_bytes) for num_bytes in self._bytes[:-1]]

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves; return it unchanged."""
        for key, storage in _storages(tensor):
            if key not in self._kept:
                self._kept[key] = storage
                self._bytes[-1] += storage.nbytes()
        return tensor

    def new_bytes(self, values: object) -> int:
        """Return the bytes of the tensors among ``values`` that did not exist before the step."""
        tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor))
        found = {key: storage for tensor in tensors for key, storage in _storages(tensor)}
        return sum(s.nbytes() for key, s in found.items() if key not in self._before)


def _storages(tensor: Tensor) -> list[tuple[int, torch.UntypedStorage]]:
    """Return a tensor's storage with a unique key, which meta tensors have as well."""
    if (
        tensor.layout is not torch.strided
    ):  # a sparse tensor has several storages without a common key
        return []
    storage = tensor.untyped_storage()
    return [(storage._cdata, storage)]


def count_saved(model: nn.Module, units: Sequence[ModelUnit], sample: SampleStep) -> SavedBytes:
    """Return the bytes that each unit's forward saves for backward; takes one step."""
    saving = _SavedTensorMeter([*model.parameters(), *model.buffers(), *sample.batch])
    step = MeteredStep(units, saving)
    inputs = [0] * len(units)
    with (
        unit_hooks(model, units, step.record),
        _input_hooks(units, lambda unit, values: _add_at(inputs, unit, saving.new_bytes(values))),
        saved_tensors_hooks(saving.pack, lambda tensor: tensor),
    ):
        step.run(sample.forward)
    step.clear_gradients()
    end = 1 + next(i for i, e in enumerate(step.events) if e.kind is StepEvent.LOSS_END)
    # The last unit's backward frees what the loss saves, so that unit owns it.
    kept = [0] * len(units)
    for slot, num_bytes in zip(step.slots()[:end], saving.intervals()[:end], strict=True):
        kept[slot.unit] += int(num_bytes)
    return SavedBytes(tuple(kept), tuple(inputs))


def _add_at(sums: list[int], index: int, more: int) -> None:
    sums[index] += more


@contextmanager
def _input_hooks(
    units: Sequence[ModelUnit], observe: Callable[[int, object], None]
) -> Iterator[None]:
    """Pass the arguments of the first call of each unit's modules to ``observe``."""

    def make_hook(index: int) -> Callable[..., None]:
        seen_modules: set[nn.Module] = set()

        def before(module: nn.Module, *values: object) -> None:
            if module not in seen_modules:
                seen_modules.add(module)
                observe(index, values)

        return before

    handles = [
        module.register_forward_pre_hook(make_hook(index), with_kwargs=True)
        for index, unit in enumerate(units)
        for module in unit.modules
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _peak_by_pass(
    model: nn.Module, units: Sequence[ModelUnit], sample: SampleStep, on_gpu: bool
) -> Mapping[UnitPass, float]:
    """Return the peak live bytes of each pass, above those before the step; takes one step."""
    gc.collect()
    if on_gpu:
        meter = GpuPeakMeter()
        step = MeteredStep(units, meter)
        with gradients_freed_at_once(units), unit_hooks(model, units, step.record):
            step.run(sample.forward)
        return max_by_pass(step.slots(), meter.intervals())
    with CpuPeakMeter() as cpu_meter:
        step = MeteredStep(units, cpu_meter)
        with gradients_freed_at_once(units), unit_hooks(model, units, step.record):
            step.run(sample.forward)
    return max_by_pass(step.slots(), cpu_meter.intervals())


@contextmanager
def gradients_freed_at_once(units: Sequence[ModelUnit]) -> Iterator[None]:
    """Free each gradient as soon as it is ready.

    Enter it before `unit_hooks`: its hooks then run first, and no event sees the gradient.
    """

    def free_gradient(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(free_gradient)
        for unit in units
        for parameter in unit.parameters
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def build_unit_costs(
    units: Sequence[ModelUnit],
    times: Sequence[Mapping[UnitPass, float]],
    saved: SavedBytes,
    peaks: Mapping[UnitPass, float],
) -> list[UnitCost]:
    """Return the units' costs from repeated ``times``, saved bytes and peaks.

    Medians of units are scaled so that they add up to the median of the whole pass.
    """
    forward_s, backward_s = (_scaled_medians(times, len(units), backward=b) for b in (False, True))
    workspace = _workspace_bytes(peaks, saved.activations)
    return [
        UnitCost(
            name=unit.name,
            numel=unit.numel,
            forward_s=forward_s[index],
            backward_s=backward_s[index],
            spread=_unit_relative_iqr(times, index),
            activation_bytes=saved.activations[index],
            input_bytes=saved.inputs[index],
            workspace_bytes=workspace[index],
            tensors=tuple(parameter.numel() for parameter in unit.parameters),
            used_often=unit.used_often,
        )
        for index, unit in enumerate(units)
    ]


def _scaled_medians(
    times: Sequence[Mapping[UnitPass, float]], count: int, *, backward: bool
) -> list[float]:
    rows = [[step.get(UnitPass(unit, backward), 0.0) for unit in range(count)] for step in times]
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    # The medians add up to less than the median of the sums, as noise hits different units.
    total_s = sum(medians)
    factor = statistics.median(map(sum, rows)) / total_s if total_s else 1.0
    return [factor * seconds for seconds in medians]


def _unit_relative_iqr(times: Sequence[Mapping[UnitPass, float]], unit: int) -> float:
    both = [sum(step.get(UnitPass(unit, b), 0.0) for b in (False, True)) for step in times]
    return spread(both) if statistics.median(both) else 0.0


def _workspace_bytes(peaks: Mapping[UnitPass, float], activations: Sequence[int]) -> list[int]:
    """Return each unit's peak, forward or backward, beyond what units up to it have saved."""
    kept, found = 0, []
    for unit, saved in enumerate(activations):
        kept += saved
        peak = max(peaks.get(UnitPass(unit, b), 0.0) for b in (False, True))
        found.append(max(0, round(peak) - kept))
    return found


def measure_update(optimizer: Optimizer, repeats: int = 9) -> float:
    """Return the median seconds of an optimizer step with small gradients.

    It changes the parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    timer: IntervalMeter = GpuTimeMeter() if parameters[0].is_cuda else CpuTimeMeter()
    times = []
    for repeat in range(-_WARM_UP, repeats):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        timer.begin()
        optimizer.step()
        timer.record()
        if repeat >= 0:
            times.append(timer.intervals()[0])
    optimizer.zero_grad(set_to_none=True)
    return statistics.median(times)


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Return the optimizer's state in bytes per element; call it after a first update."""
    bytes_per_element = (
        sum(v.element_size() for v in state.values() if _has_shape_of(v, parameter))
        for parameter, state in optimizer.state.items()
    )
    return max(bytes_per_element, default=0)


def _has_shape_of(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def other_bytes(model: nn.Module, batch: Iterable[Tensor]) -> int:
    """Return the bytes that no strategy shards: buffers, frozen parameters and the batch."""
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    kept = {key: s for t in (*frozen, *model.buffers(), *batch) for key, s in _storages(t)}
    return sum(storage.nbytes() for storage in kept.values())


_MEASURED_FIELDS = (
    "forward_s",
    "backward_s",
    "spread",
    "activation_bytes",
    "input_bytes",
    "workspace_bytes",
)
"""The fields of a `UnitCost` that may differ between ranks; the seconds come first."""


def max_over_ranks(costs: Sequence[UnitCost], transport: Transport) -> list[UnitCost]:
    """Return the units' costs with the maximum over ranks of every field; all ranks call it.

    Seconds are then scaled down so that they add up to the step of the slowest rank. Different
    units may be slow on different ranks, so the maxima add up to more than any real step.
    """
    values_by_rank = torch.zeros(
        transport.size, len(costs), len(_MEASURED_FIELDS), dtype=torch.float64
    )
    own_values = [[float(getattr(cost, figure)) for figure in _MEASURED_FIELDS] for cost in costs]
    values_by_rank[transport.rank] = torch.tensor(own_values, dtype=torch.float64)
    all_reduce_small_(values_by_rank, transport)
    maxima = values_by_rank.amax(dim=0)
    total_s = float(values_by_rank[..., :2].sum(dim=(1, 2)).max())
    maxima[:, :2] *= total_s / max(float(maxima[:, :2].sum()), 1e-12)
    kinds = [type(getattr(costs[0], figure)) for figure in _MEASURED_FIELDS]
    rows = [zip(_MEASURED_FIELDS, kinds, row, strict=True) for row in maxima.tolist()]
    return [
        cost.model_copy(update={figure: kind(value) for figure, kind, value in row})
        for cost, row in zip(costs, rows, strict=True)
    ]

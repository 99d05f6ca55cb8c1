"""Assembly of the sharded strategy: plan, sharded units, collectives and updates of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.cluster.world import Mesh
from stretto.collectives.codecs import WIRE_DTYPES
from stretto.comm.broadcast import compute_on_rank_0
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.shard_layout import ALIGN, UnitLayout, make_unit_layout
from stretto.comm.transport import Transport, all_gather_text
from stretto.errors import ConfigError, StrettoError
from stretto.planner.check import check
from stretto.planner.explain import summary_line
from stretto.planner.model_units import ModelUnit
from stretto.planner.plan import Plan, Unit
from stretto.planner.planner import make_plan
from stretto.planner.profile import Profile, read_profile
from stretto.planner.timing import check_same_units
from stretto.planner.unit_choices import PlanConstraints
from stretto.strategies.sharded.config import ShardedConfig, adapt_plan, plan_for, units_of
from stretto.strategies.sharded.shard_collectives import ShardCollectives
from stretto.strategies.sharded.sharded_unit import MemoryTracker, ShardedUnit, UnitDtypes
from stretto.strategies.sharded.updates import (
    GradientInput,
    ShardNorms,
    ShardUpdates,
    UnitState,
    check_optimizer,
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was measured or estimated of the model before it is sharded."""

    calls: Sequence[str] | None = None
    """Names of the modules that a forward calls, in order."""
    profile: Profile | None = None
    """Time and memory that the model takes, used if no profile file is set."""
    barrier: bool = False
    """Whether all gradients are read before the update."""
    report_plan: Callable[[str], None] = lambda _text: None
    """Called on rank 0 with a summary of a plan that is made at the start."""


def make_plan_at_start(
    config: ShardedConfig,
    model_info: ModelInfo,
    units: Sequence[ModelUnit],
    transport: Transport,
    *,
    whole_layers: bool,
) -> Plan:
    """Return the plan that rank 0 makes for ``config.memory`` (collective).

    Raises:
        ConfigError: On all ranks, if no plan fits.
    """
    shapes = [unit.shape for unit in units]

    def make() -> str:
        profile = _profile(config, model_info)
        check_same_units(profile, shapes, config.profile or "the estimate")
        link = profile.link.model_copy(update=_ranks_and_hosts(transport))
        profile = profile.model_copy(update={"link": link})
        allowed = PlanConstraints(
            checkpoint=config.checkpoint, barrier=model_info.barrier, whole_layers=whole_layers
        )
        planned = make_plan(profile, config.memory or 0, allowed)
        model_info.report_plan(f"{config.profile or 'an estimate'} says: {summary_line(planned)}")
        return planned.plan.to_json()

    result = compute_on_rank_0(make, transport)
    plan = adapt_plan(Plan.model_validate_json(result), shapes, "the plan made at the start")
    check(plan)
    return plan


def _profile(config: ShardedConfig, model_info: ModelInfo) -> Profile:
    if config.profile is not None:
        return read_profile(Path(config.profile))
    if model_info.profile is None:
        raise ConfigError(
            "strategy.memory: nothing is known of the model; set strategy.profile, a file of "
            "stretto profile"
        )
    return model_info.profile


def _ranks_and_hosts(transport: Transport) -> dict[str, int]:
    """Return the ``ranks`` and ``hosts`` of a profile's link for this run's mesh."""
    mesh = transport.mesh
    even = len(set(mesh.ranks_per_host)) == 1
    return {"ranks": mesh.size, "hosts": mesh.hosts if even else 1}


def refuse_shared_storage(units: Sequence[ModelUnit]) -> None:
    """Refuse two parameter objects in the same memory: sharding would separate them.

    Raises:
        ConfigError: Names the two parameters.
    """
    spans: list[tuple[int, int, str]] = []
    for unit in units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            start = parameter.data_ptr()
            spans.append((start, start + _extent_bytes(parameter), name))
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ConfigError(
                f"parameters {name} and {other} share memory but are two objects: sharded, each "
                "would go its own way; make them one nn.Parameter that both modules hold"
            )


def _extent_bytes(tensor: Tensor) -> int:
    """Return the bytes from the start of a tensor's first element to the end of its last."""
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


class ParameterOwners:
    """Remembers which module holds each sharded parameter, to detect replaced parameters."""

    def __init__(self, model: nn.Module, units: Sequence[ModelUnit]) -> None:
        sharded_ids = {id(p) for unit in units for p in unit.parameters}
        self._holders = [
            (module, key, parameter, f"{prefix}.{key}".lstrip("."))
            for prefix, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in sharded_ids
        ]

    def check(self) -> None:
        """Check that every module still holds the parameters that were sharded.

        Raises:
            StrettoError: Names a parameter that was replaced.
        """
        for module, key, parameter, name in self._holders:
            if module._parameters.get(key) is not parameter:
                raise StrettoError(
                    f"parameter {name} was replaced after the model was distributed: the new one "
                    "would not be gathered, reduced or updated; replace it before, or write into "
                    "it (copy_) between consolidate and the next step"
                )


class ShardedModel(NamedTuple):
    """A sharded model and the objects that run its plan."""

    plan: Plan
    model_units: list[ModelUnit]
    units: list[UnitState]
    collectives: ShardCollectives
    updates: ShardUpdates
    memory_tracker: MemoryTracker


def shard_model(
    config: ShardedConfig,
    transport: Transport,
    executor: CollectiveExecutor,
    model: nn.Module,
    optimizer: Optimizer,
    model_info: ModelInfo,
) -> ShardedModel:
    """Shard ``model`` by its plan (collective); the ranks' models must be equal."""
    check_optimizer(optimizer)
    has_layer_norms = hasattr(optimizer, "norms")
    model_units = units_of(config, model, model_info.calls)
    refuse_shared_storage(model_units)
    if config.memory is None:
        plan = plan_for(
            config,
            model_units,
            whole_layers=has_layer_norms,
            order_is_known=model_info.calls is not None,
        )
    else:
        plan = make_plan_at_start(
            config, model_info, model_units, transport, whole_layers=has_layer_norms
        )
    _check_same_plan(plan, transport)
    memory_tracker = MemoryTracker(plan.slots.count)
    units = [
        _shard_unit(config, transport, plan, index, unit, memory_tracker)
        for index, unit in enumerate(model_units)
    ]
    collectives = ShardCollectives(
        executor, transport, [unit_state.sharded for unit_state in units], config.algorithm
    )
    for unit_state in units:
        unit_state.sharded.free_gradients()
    norms = _shard_norms(units, transport, collectives) if has_layer_norms else None
    if norms is not None:
        optimizer.norms = norms  # type: ignore[attr-defined]
    return ShardedModel(
        plan, model_units, units, collectives, ShardUpdates(optimizer, units, norms), memory_tracker
    )


def _check_same_plan(plan: Plan, transport: Transport) -> None:
    digests = all_gather_text(plan.digest(), transport)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ConfigError(
                f"rank {rank} has another plan than rank 0 ({digest}, not {digests[0]}): every "
                "rank must be given the same model, optimizer and strategy"
            )


def _shard_unit(
    config: ShardedConfig,
    transport: Transport,
    plan: Plan,
    index: int,
    unit: ModelUnit,
    memory_tracker: MemoryTracker,
) -> UnitState:
    planned = plan.units[index]
    model_dtype = unit.parameters[0].dtype
    compute = WIRE_DTYPES[config.parameters] or model_dtype
    dtypes = UnitDtypes(compute, WIRE_DTYPES[config.wire] or compute, _update_dtype(model_dtype))
    layout = layout_of(planned, [p.numel() for p in unit.parameters], transport.mesh)
    rank = transport.rank % layout.ranks
    sharded_unit = ShardedUnit(unit.parameters, layout, planned, rank, dtypes, memory_tracker)
    return UnitState(sharded_unit, GradientInput(sharded_unit), unit.always_active)


def layout_of(planned: Unit, numels: Sequence[int], mesh: Mesh) -> UnitLayout:
    """Return the layout of a unit with tensors of ``numels`` elements on ``mesh``."""
    if planned.in_host:
        return make_unit_layout(numels, planned.blocks, _per_host(mesh), ALIGN * mesh.hosts)
    return make_unit_layout(numels, planned.blocks, mesh.size)


def _per_host(mesh: Mesh) -> int:
    if len(set(mesh.ranks_per_host)) != 1:
        raise ConfigError(
            f"strategy.in_host: hosts have {', '.join(map(str, mesh.ranks_per_host))} ranks; a "
            "unit that is shared out in each host needs hosts of equal size"
        )
    return mesh.ranks_per_host[0]


def _update_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """Return the type that updates are made in: the model's, but at least 32 bits."""
    return model_dtype if model_dtype.itemsize >= 4 else torch.float32


def _shard_norms(
    units: list[UnitState], transport: Transport, collectives: ShardCollectives
) -> ShardNorms:
    layers: dict[torch.Tensor, int] = {}
    contributes: list[bool] = []
    for unit_state in units:
        first = len(contributes)
        contributes += [is_counted_here(unit_state.sharded, transport)] * len(
            unit_state.sharded.parameters
        )
        layers.update({p.parameter: first + p.tensor for p in unit_state.sharded.param_slices})
    return ShardNorms(layers, contributes, collectives.make_small_all_reduce(2 * len(contributes)))


def is_counted_here(sharded_unit: ShardedUnit, transport: Transport) -> bool:
    """Return whether a sum over ranks includes this rank's slices, so each element counts once.

    Of a unit that every rank holds whole, only rank 0 counts. Of a unit that is sharded within each
    host, only the first host counts.
    """
    if not sharded_unit.sharding.shards_optimizer:
        return transport.rank == 0
    return not sharded_unit.in_host or transport.rank < sharded_unit.layout.ranks

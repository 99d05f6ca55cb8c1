"""From a model, its optimizer and a config to everything that the sharded strategy works with."""

from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.cluster.world import Mesh
from stretto.comm.buckets import WIRE
from stretto.comm.channel import Channel
from stretto.comm.courier import Courier
from stretto.comm.shards import ALIGN, lay_unit
from stretto.comm.small import gather_text
from stretto.errors import ConfigError
from stretto.plan.units import ModelUnit
from stretto.plan.value import Plan
from stretto.strategy.sharded.assumptions import refuse_shared_storage
from stretto.strategy.sharded.carriage import Carriage
from stretto.strategy.sharded.config import ShardedConfig, plan_for, units_of
from stretto.strategy.sharded.intake import Intake
from stretto.strategy.sharded.known import Known, plan_at_start
from stretto.strategy.sharded.ledger import Ledger
from stretto.strategy.sharded.norms import ShardNorms
from stretto.strategy.sharded.storage import Types, UnitStorage
from stretto.strategy.sharded.updates import Held, Updates, refuse_unfit


class Assembled(NamedTuple):
    """A model cut up."""

    plan: Plan
    model_units: list[ModelUnit]
    units: list[Held]
    carriage: Carriage
    updates: Updates
    ledger: Ledger


def cut_up(
    config: ShardedConfig,
    channel: Channel,
    courier: Courier,
    model: nn.Module,
    optimizer: Optimizer,
    known: Known,
) -> Assembled:
    """Cut ``model`` up as its plan says; all ranks together, with equal models."""
    refuse_unfit(optimizer)
    by_layer = hasattr(optimizer, "norms")
    found = units_of(config, model, known.calls)
    refuse_shared_storage(found)
    if config.memory is None:
        plan = plan_for(config, found, whole_layers=by_layer, seen=known.calls is not None)
    else:
        plan = plan_at_start(config, known, found, channel, whole_layers=by_layer)
    _agree_on(plan, channel)
    ledger = Ledger(plan.slots.count)
    units = [_hold(config, channel, plan, index, unit, ledger) for index, unit in enumerate(found)]
    carriage = Carriage(courier, channel, [held.storage for held in units], config.algorithm)
    for held in units:
        held.storage.empty_gradients()
    norms = _shard_norms(units, channel, carriage) if by_layer else None
    if norms is not None:
        optimizer.norms = norms  # type: ignore[attr-defined]
    return Assembled(plan, found, units, carriage, Updates(optimizer, units, norms), ledger)


def _agree_on(plan: Plan, channel: Channel) -> None:
    digests = gather_text(plan.digest(), channel)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ConfigError(
                f"rank {rank} has another plan than rank 0 ({digest}, not {digests[0]}): every "
                "rank must be given the same model, optimizer and strategy"
            )


def _hold(
    config: ShardedConfig,
    channel: Channel,
    plan: Plan,
    index: int,
    unit: ModelUnit,
    ledger: Ledger,
) -> Held:
    planned = plan.units[index]
    own = unit.parameters[0].dtype
    compute = WIRE[config.parameters] or own
    types = Types(compute, WIRE[config.wire] or compute, _kept(own))
    ranks, rank, grain = channel.size, channel.rank, ALIGN
    if planned.in_host:
        hosts, ranks = channel.mesh.hosts, _per_host(channel.mesh)
        rank, grain = rank % ranks, grain * hosts
    layout = lay_unit([p.numel() for p in unit.parameters], planned.blocks, ranks, grain)
    storage = UnitStorage(unit.parameters, layout, planned, rank, types, ledger)
    return Held(storage, Intake(storage), unit.spread)


def _per_host(mesh: Mesh) -> int:
    if len(set(mesh.ranks_per_host)) != 1:
        raise ConfigError(
            f"strategy.in_host: hosts have {', '.join(map(str, mesh.ranks_per_host))} ranks; a "
            "unit that is shared out in each host needs hosts of equal size"
        )
    return mesh.ranks_per_host[0]


def _kept(own: torch.dtype) -> torch.dtype:
    """Return the type that updates are made in: 32 bits at least."""
    return own if own.itemsize >= 4 else torch.float32


def _shard_norms(units: list[Held], channel: Channel, carriage: Carriage) -> ShardNorms:
    layers: dict[torch.Tensor, int] = {}
    counted: list[bool] = []
    for held in units:
        first = len(counted)
        counted += [counts_once(held.storage, channel)] * len(held.storage.parameters)
        layers.update({p.parameter: first + p.tensor for p in held.storage.pieces})
    return ShardNorms(layers, counted, carriage.small_sum(2 * len(counted)))


def counts_once(storage: UnitStorage, channel: Channel) -> bool:
    """Say whether this rank's pieces of a unit count, where each element should count once.

    Of what every rank has all of, rank 0's do; of what every host has, those of the first host.
    """
    if not storage.sharding.is_split:
        return channel.rank == 0
    return not storage.in_host or channel.rank < storage.layout.ranks

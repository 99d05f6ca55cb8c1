"""From a model, its optimizer and a config to everything that the sharded strategy works with."""

from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.comm.channel import Channel
from stretto.comm.courier import Courier
from stretto.comm.shards import lay_unit
from stretto.comm.small import add_up_, gather_text
from stretto.errors import ConfigError
from stretto.plan.value import Plan
from stretto.strategy.sharded.carriage import Carriage
from stretto.strategy.sharded.config import HALF, ShardedConfig, plan_for, units_of
from stretto.strategy.sharded.intake import Intake
from stretto.strategy.sharded.ledger import Ledger
from stretto.strategy.sharded.norms import ShardNorms
from stretto.strategy.sharded.storage import Types, UnitStorage
from stretto.strategy.sharded.units import ModelUnit
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
) -> Assembled:
    """Cut ``model`` up as its plan says; all ranks together, with equal models."""
    refuse_unfit(optimizer)
    by_layer = hasattr(optimizer, "norms")
    found = units_of(config, model)
    plan = plan_for(config, found, whole_layers=by_layer)
    _agree_on(plan, channel)
    ledger = Ledger(plan.slots.count)
    units = [_hold(config, channel, plan, index, unit, ledger) for index, unit in enumerate(found)]
    carriage = Carriage(courier, channel.mesh, [held.storage for held in units], config.algorithm)
    for held in units:
        held.storage.empty_gradients()
    norms = _shard_norms(units, channel) if by_layer else None
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
    compute = HALF[config.parameters] or own
    types = Types(compute, HALF[config.wire] or compute, _kept(own))
    layout = lay_unit([p.numel() for p in unit.parameters], planned.blocks, channel.size)
    storage = UnitStorage(unit.parameters, layout, planned.sharding, channel.rank, types, ledger)
    return Held(storage, Intake(storage), unit.spread)


def _kept(own: torch.dtype) -> torch.dtype:
    """Return the type that updates are made in: 32 bits at least."""
    return own if own.itemsize >= 4 else torch.float32


def _shard_norms(units: list[Held], channel: Channel) -> ShardNorms:
    layers: dict[torch.Tensor, int] = {}
    split: list[bool] = []
    for held in units:
        first = len(split)
        split += [held.storage.sharding.is_split] * len(held.storage.parameters)
        layers.update({p.parameter: first + p.tensor for p in held.storage.pieces})
    return ShardNorms(
        layers,
        # Of what every rank has all of, one rank's squares count.
        [is_split or channel.rank == 0 for is_split in split],
        lambda squares: add_up_(squares, channel),
    )

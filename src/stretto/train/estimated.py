"""A profile of a run that has not run: its model counted on meta tensors, its links described."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from stretto.cluster.world import Mesh
from stretto.comm.buckets import WIRE
from stretto.comm.channel import Channel
from stretto.data import Source
from stretto.errors import ConfigError
from stretto.measure.allocator import as_taken
from stretto.measure.estimate import Rates, Subject, estimate_units, on_meta, parse_rates
from stretto.measure.profile import other_bytes, remembered_bytes
from stretto.model import per_sample_loss
from stretto.optim import AnyOptim, make_optimizer
from stretto.plan.linking import block_bytes, described, is_nested, link_from_cluster
from stretto.plan.profile import Link, Profile
from stretto.plan.units import ModelUnit, find_units
from stretto.sim.cluster import Cluster
from stretto.strategy.sharded.carriage import COMMUNICATORS, LANES
from stretto.strategy.sharded.config import AUTO, ShardedConfig
from stretto.strategy.sharded.known import told_by_rank_0
from stretto.strategy.sharded.storage import Types
from stretto.train.config import TrainConfig
from stretto.train.precision import HALF, Precision

_LR = 1e-3
"""Any: what an optimizer remembers does not depend on it."""


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What one rank of a run computes, and how the run keeps and updates it."""

    model: nn.Module
    own: torch.dtype
    """The type in which the model was built: units are found by it."""
    batch: tuple[Tensor, Tensor]
    """As many samples as go through forward and backward at once, at the most."""
    strategy: ShardedConfig
    optim: AnyOptim
    precision: Precision = "fp32"
    calls: Sequence[str] | None = None
    """The modules that a forward calls, in order, where somebody has seen one."""

    @property
    def types(self) -> Types:
        """What elements are kept and travel as: what a strategy would make of its words."""
        compute = WIRE[self.strategy.parameters] or self.own
        kept = self.own if self.own.itemsize >= 4 else torch.float32
        return Types(compute, WIRE[self.strategy.wire] or compute, kept)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean loss of ``model`` on ``batch``."""
        inputs, targets = batch
        return per_sample_loss(model(inputs), targets).mean()

    def find(self, model: nn.Module, calls: Sequence[str], num_bytes: int) -> list[ModelUnit]:
        """Return the units of ``model``, joined up to ``num_bytes``."""
        seen = calls if self.calls is None else self.calls
        return find_units(model, num_bytes // self.own.itemsize, seen)


def own_type(model: nn.Module) -> torch.dtype:
    """Return the type of what is trained."""
    return next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)


def joined_bytes(strategy: ShardedConfig, link: Link) -> int:
    """Return up to how many bytes neighbours are joined: as many as make a message worth it."""
    return block_bytes(link) if strategy.unit is None else strategy.unit


def lanes_in(mesh: Mesh, device: str, algorithm: str) -> int:
    """Return how many blocks travel beside each other in a run.

    Where a block has phases, or an algorithm with lanes of its own, they follow each other.
    """
    if algorithm != AUTO:
        return 1
    if device != "cpu":
        return COMMUNICATORS
    return 1 if is_nested(mesh) else LANES


def rates_of(device: str) -> Rates:
    """Return the rates of a device, by its name or as two figures.

    Raises:
        ConfigError: It is neither.
    """
    return parse_rates("h200" if device == "cuda" else device)


def widths_of(run: Ingredients) -> dict[str, int]:
    """Return the bytes of one element, as a profile calls them."""
    # The smallest that has rows: what is remembered of an element is the same for all.
    types = run.types
    one = nn.Parameter(torch.zeros(4, 4, dtype=types.kept))
    optimizer = make_optimizer(run.optim, peak_lr=_LR)([one])
    one.grad = torch.ones_like(one)
    optimizer.step()
    return {
        "parameter_bytes": types.compute.itemsize,
        "gradient_bytes": types.wire.itemsize,
        "kept_bytes": types.kept.itemsize,
        "state_bytes": remembered_bytes(optimizer),
    }


def estimate_profile(run: Ingredients, cluster: Cluster, device: str, called: str) -> Profile:
    """Return what a run would take on a cluster, which people call ``called``, of such devices.

    Nothing is computed or sent, and the model stays as it is.

    Raises:
        ConfigError: Nobody knows the device, or the model does not run without numbers.
    """
    rates = rates_of(device)
    lanes = lanes_in(cluster.mesh, device, run.strategy.algorithm)
    link = link_from_cluster(cluster, lanes=lanes)
    unit_bytes = joined_bytes(run.strategy, link)
    kept = on_meta(run.model).to(run.types.compute)
    # Nobody casts tensors without numbers while they run: everything is of that type.
    half = HALF.get(run.precision)
    model = kept if half is None else on_meta(kept).to(half)
    dtype = own_type(model)
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in run.batch)
    subject = Subject(model, run.loss, batch, lambda m, calls: run.find(m, calls, unit_bytes))
    costs = estimate_units(subject, rates)
    widths = widths_of(run)
    # An update reads gradients, reads and writes what is kept and remembered.
    moved = 3 * widths["kept_bytes"] + 2 * widths["state_bytes"]
    found = Profile(
        units=tuple(costs),
        link=link.model_copy(update={"copies": device == "cpu"}),
        update_s=moved * sum(cost.numel for cost in costs) / rates.bytes_per_s,
        other_bytes=other_bytes(kept, batch),
        source=f"estimated at the rates of {device}, link of {called}",
        unit_bytes=unit_bytes,
        **widths,
    )
    return as_taken(found, device)


def needs_estimate(strategy: ShardedConfig) -> bool:
    """Say whether a plan is made at the start, and links are described instead of a profile."""
    is_planned = strategy.memory is not None and strategy.profile is None
    return is_planned and strategy.cluster is not None


def check_estimable(strategy: ShardedConfig) -> None:
    """Find mistakes in what an estimate would be for, before anything starts.

    Raises:
        ConfigError: There is no such cluster or device.
    """
    if not needs_estimate(strategy):
        return
    described(strategy.cluster or "")
    try:
        rates_of(strategy.device)
    except ConfigError as wrong:
        reason = str(wrong).removeprefix(f"--device {strategy.device}: ")
        raise ConfigError(f"strategy.device = {strategy.device!r}: {reason}") from None


def estimate_at_start(run: Ingredients, channel: Channel) -> Profile:
    """Return what rank 0 estimates for the ranks that there are; all ranks together.

    Only where `needs_estimate`.

    Raises:
        ConfigError: On all ranks, if it cannot be estimated.
    """

    def estimate() -> str:
        word = run.strategy.cluster or ""
        cluster = described(word).with_mesh(channel.mesh)
        return estimate_profile(run, cluster, run.strategy.device, word).model_dump_json()

    return Profile.model_validate_json(told_by_rank_0(estimate, channel))


def largest_piece(config: TrainConfig, source: Source, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the shape of the most samples that a rank computes at once; none is read for it."""
    share = -(-config.batch // ranks)
    samples = max(config.piece_sizes(share, ranks))
    inputs, targets = source.batch(np.zeros(0, dtype=np.int64))
    return _room(inputs, samples), _room(targets, samples)


def _room(empty: Tensor, samples: int) -> Tensor:
    return empty.new_empty((samples, *empty.shape[1:]), device="meta")

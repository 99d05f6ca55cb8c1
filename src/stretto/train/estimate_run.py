"""Estimate a run's profile without running it: the model on meta tensors, the links from a file."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from stretto.cluster.world import Mesh
from stretto.collectives.codecs import WIRE_DTYPES
from stretto.comm.broadcast import compute_on_rank_0
from stretto.comm.transport import Transport
from stretto.data import SampleSource
from stretto.errors import ConfigError
from stretto.models import per_sample_loss
from stretto.optim import AnyOptimConfig, make_optimizer
from stretto.planner.model_units import ModelUnit, find_units
from stretto.planner.profile import (
    Link,
    Profile,
    is_hierarchical,
    link_from_cluster,
    load_cluster_or_preset,
    worthwhile_unit_bytes,
)
from stretto.profiler.estimate import (
    DeviceRates,
    ModelToEstimate,
    estimate_units,
    parse_rates,
    to_meta,
)
from stretto.profiler.measure_units import optimizer_state_bytes, other_bytes
from stretto.profiler.meters import add_allocator_overhead
from stretto.simulator.cluster import Cluster
from stretto.strategies.sharded.config import AUTO, ShardedConfig
from stretto.strategies.sharded.shard_collectives import NUM_GPU_LANES, NUM_LANES
from stretto.strategies.sharded.sharded_unit import UnitDtypes
from stretto.train.config import TrainConfig
from stretto.train.precision import HALF_DTYPES, Precision

_LR = 1e-3
"""Any value: the size of the optimizer state does not depend on it."""


@dataclass(frozen=True, slots=True)
class EstimateInputs:
    """What one rank computes, and which strategy and optimizer it uses."""

    model: nn.Module
    parameter_dtype: torch.dtype
    """The type in which the model was built; it determines the units."""
    batch: tuple[Tensor, Tensor]
    """A batch of the largest micro-batch size."""
    strategy: ShardedConfig
    optim: AnyOptimConfig
    precision: Precision = "fp32"
    calls: Sequence[str] | None = None
    """The modules that a forward calls, in order, if that was recorded."""

    @property
    def types(self) -> UnitDtypes:
        """The types of parameters, gradients and master weights under the strategy."""
        compute = WIRE_DTYPES[self.strategy.parameters] or self.parameter_dtype
        master = self.parameter_dtype if self.parameter_dtype.itemsize >= 4 else torch.float32
        return UnitDtypes(compute, WIRE_DTYPES[self.strategy.wire] or compute, master)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean loss of ``model`` on ``batch``."""
        inputs, targets = batch
        return per_sample_loss(model(inputs), targets).mean()

    def find_units(self, model: nn.Module, calls: Sequence[str], num_bytes: int) -> list[ModelUnit]:
        """Return the units of ``model``, merged up to ``num_bytes``."""
        call_order = calls if self.calls is None else self.calls
        return find_units(model, num_bytes // self.parameter_dtype.itemsize, call_order)


def parameter_dtype(model: nn.Module) -> torch.dtype:
    """Return the type of the trained parameters."""
    return next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)


def target_unit_bytes(strategy: ShardedConfig, link: Link) -> int:
    """Return the size in bytes up to which neighbouring units are merged.

    Unless the strategy sets it, it is the size at which bandwidth outweighs latency on ``link``.
    """
    return worthwhile_unit_bytes(link) if strategy.unit is None else strategy.unit


def num_lanes(mesh: Mesh, device: str, algorithm: str) -> int:
    """Return how many blocks a run transfers at the same time.

    It is 1 if a block has several phases, or if the algorithm has lanes of its own.
    """
    if algorithm != AUTO:
        return 1
    if device != "cpu":
        return NUM_GPU_LANES
    return 1 if is_hierarchical(mesh) else NUM_LANES


def device_rates(device: str) -> DeviceRates:
    """Return the rates of a device, given by name or as two numbers.

    Raises:
        ConfigError: ``device`` is neither.
    """
    return parse_rates("h200" if device == "cuda" else device)


def element_widths(run: EstimateInputs) -> dict[str, int]:
    """Return the bytes per element of parameters, gradients, master weights and optimizer state."""
    # The smallest matrix is enough, because the state per element is the same for all sizes.
    types = run.types
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=types.master))
    optimizer = make_optimizer(run.optim, peak_lr=_LR)([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "parameter_bytes": types.compute.itemsize,
        "gradient_bytes": types.wire.itemsize,
        "kept_bytes": types.master.itemsize,
        "state_bytes": optimizer_state_bytes(optimizer),
    }


def estimate_profile(
    run: EstimateInputs, cluster: Cluster, device: str, cluster_name: str
) -> Profile:
    """Return the estimated profile of ``run`` on ``cluster`` with devices of type ``device``.

    Nothing is computed or sent, and the model is not changed. ``cluster_name`` only describes the
    source of the profile.

    Raises:
        ConfigError: The device is unknown, or the model cannot run on meta tensors.
    """
    rates = device_rates(device)
    lanes = num_lanes(cluster.mesh, device, run.strategy.algorithm)
    link = link_from_cluster(cluster, lanes=lanes)
    unit_bytes = target_unit_bytes(run.strategy, link)
    master = to_meta(run.model).to(run.types.compute)
    # Autocast does not apply to meta tensors, so the whole model is converted.
    half = HALF_DTYPES.get(run.precision)
    model = master if half is None else to_meta(master).to(half)
    dtype = parameter_dtype(model)
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in run.batch)
    model_to_estimate = ModelToEstimate(
        model, run.loss, batch, lambda m, calls: run.find_units(m, calls, unit_bytes)
    )
    costs = estimate_units(model_to_estimate, rates)
    widths = element_widths(run)
    # An update reads gradients, and reads and writes master weights and optimizer state.
    moved_bytes = 3 * widths["kept_bytes"] + 2 * widths["state_bytes"]
    profile = Profile(
        units=tuple(costs),
        link=link.model_copy(update={"copies": device == "cpu"}),
        update_s=moved_bytes * sum(cost.numel for cost in costs) / rates.bytes_per_s,
        other_bytes=other_bytes(master, batch),
        source=f"estimated at the rates of {device}, link of {cluster_name}",
        unit_bytes=unit_bytes,
        **widths,
    )
    return add_allocator_overhead(profile, device)


def needs_estimate(strategy: ShardedConfig) -> bool:
    """Return whether the run plans at the start from a described cluster instead of a profile."""
    is_planned = strategy.memory is not None and strategy.profile is None
    return is_planned and strategy.cluster is not None


def check_estimable(strategy: ShardedConfig) -> None:
    """Check the cluster and the device of an estimate before the run starts.

    Raises:
        ConfigError: There is no such cluster or device.
    """
    if not needs_estimate(strategy):
        return
    load_cluster_or_preset(strategy.cluster or "")
    try:
        device_rates(strategy.device)
    except ConfigError as wrong:
        reason = str(wrong).removeprefix(f"--device {strategy.device}: ")
        raise ConfigError(f"strategy.device = {strategy.device!r}: {reason}") from None


def estimate_at_start(run: EstimateInputs, transport: Transport) -> Profile:
    """Return the profile that rank 0 estimates for this mesh; all ranks call this together.

    Call it only if `needs_estimate`.

    Raises:
        ConfigError: On all ranks, if it cannot be estimated.
    """

    def estimate() -> str:
        cluster_name = run.strategy.cluster or ""
        cluster = load_cluster_or_preset(cluster_name).with_mesh(transport.mesh)
        return estimate_profile(run, cluster, run.strategy.device, cluster_name).model_dump_json()

    return Profile.model_validate_json(compute_on_rank_0(estimate, transport))


def largest_micro_batch(
    config: TrainConfig, source: SampleSource, ranks: int
) -> tuple[Tensor, Tensor]:
    """Return meta tensors of the size of the largest micro-batch; no sample is read."""
    share = -(-config.batch // ranks)
    samples = max(config.micro_batch_sizes(share, ranks))
    inputs, targets = source.batch(np.zeros(0, dtype=np.int64))
    return _meta_tensor(inputs, samples), _meta_tensor(targets, samples)


def _meta_tensor(empty: Tensor, samples: int) -> Tensor:
    return empty.new_empty((samples, *empty.shape[1:]), device="meta")

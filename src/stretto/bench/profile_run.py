"""Make the profile of a run: measure or estimate the model, measure or describe the links."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.bench.calibrate import broadcast_cluster
from stretto.bench.calibration_run import (
    BlockConfig,
    BlockTraffic,
    correct_generated_plans,
    fit_profile,
    time_calibration_steps,
    time_generated_plans,
)
from stretto.bench.peers import BenchSetup
from stretto.bench.step import synthetic_batch
from stretto.cluster.world import World
from stretto.comm.connect import connect
from stretto.comm.transport import Transport
from stretto.errors import ConfigError, StrettoError
from stretto.models import build_model
from stretto.optim import make_optimizer
from stretto.planner.model_units import ModelUnit, called_modules
from stretto.planner.profile import (
    LatencyBandwidth,
    Link,
    Profile,
    is_hierarchical,
    link_from_cluster,
    link_from_costs,
    load_cluster_or_preset,
    read_profile,
)
from stretto.profiler.interleaved_timing import all_reduce_max
from stretto.profiler.links import measure_message_cost
from stretto.profiler.measure_units import (
    SampleStep,
    max_over_ranks,
    measure_units,
    measure_update,
    other_bytes,
)
from stretto.profiler.meters import add_allocator_overhead
from stretto.profiler.slowdown import measure_slowdown
from stretto.run import RunConfig
from stretto.simulator.cluster import Cluster
from stretto.strategies.sharded.config import ShardedConfig
from stretto.telemetry.sinks import write_atomically
from stretto.train.estimate_run import (
    EstimateInputs,
    device_rates,
    element_widths,
    estimate_profile,
    num_lanes,
    parameter_dtype,
    target_unit_bytes,
)

_LR = 1e-3
"""The learning rate of timed updates; any value takes the same time."""
_LARGE_BLOCK_BYTES = 16_000_000
"""Size of the blocks that measure the rate of a single lane."""
_TRAFFIC_BLOCK_BYTES = 2_000_000
"""Size of the blocks that keep the link busy during steps; about that of a run."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The options of `stretto profile`."""

    repeats: int = 9
    """Number of timed steps, and of timed messages of each size."""
    device: str = "cpu"
    cluster: str | None = None
    """A cluster description or preset to take the link from; None measures messages."""
    estimate: bool = False
    """Whether the model is estimated from the rates of ``device`` instead of measured."""


def profile_run(
    config: RunConfig, world: World, options: ProfileOptions, log_line: Callable[[str], None]
) -> Profile:
    """Return the profile of a run, the same on all ranks, which call this together.

    Raises:
        ConfigError: The options do not determine the link, or the model does not run.
    """
    check_profile_options(world, options)
    torch.set_num_threads(config.run.threads or world.threads)
    if options.estimate:
        return _estimate(config, world, options)
    transport = connect(world, config.run.timeout_s, device=options.device)
    try:
        return _measure(config, world, options, transport, log_line)
    finally:
        transport.close()


def check_profile_options(world: World, options: ProfileOptions) -> None:
    """Check that the options and the ranks are enough to make a profile.

    Raises:
        ConfigError: Something is missing; the message says what to do.
    """
    if options.repeats < 1:
        raise ConfigError(f"--repeats {options.repeats}: expected at least 1")
    if options.estimate:
        device_rates(options.device)  # raises if the device is unknown
    elif options.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {options.device}: expected cpu (Gloo) or cuda (NCCL)")
    if options.estimate and options.cluster is None:
        raise ConfigError(
            "--estimate sends nothing: describe the links with --cluster, a file of stretto "
            'calibrate or a preset such as "gpu nodes 100gbit"'
        )
    if options.cluster is None and world.size < 2:
        raise ConfigError(
            "one rank has no link to measure: start this as `stretto lab --hosts 4 --rate 400mbit "
            "-- stretto profile RUN.toml`, or under torchrun; or describe the links with "
            "--cluster, a file of stretto calibrate or a preset"
        )
    if options.device == "cuda" and not options.estimate and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here, or this PyTorch has no CUDA")


def ingredients_of(config: RunConfig, world: World, cluster: Cluster | None) -> EstimateInputs:
    """Return the model, batch and settings of a run, as inputs of an estimate.

    The batch is synthetic, see `synthetic_batch`. Its size is a rank's share on ``cluster``, or
    without a cluster on ``world``.
    """
    if cluster is not None:
        world = replace(world, rank=world.rank % cluster.mesh.size, mesh=cluster.mesh)
    model = build_model(config.model, config.run.seed)
    inputs, targets = synthetic_batch(config, world)
    max_samples = max(config.train.micro_batch_sizes(len(inputs), world.size))
    strategy = config.strategy
    return EstimateInputs(
        model=model,
        parameter_dtype=parameter_dtype(model),
        batch=(inputs[:max_samples].clone(), targets[:max_samples].clone()),
        strategy=strategy if isinstance(strategy, ShardedConfig) else ShardedConfig(),
        optim=config.optim,
        precision=config.train.precision,
    )


def _estimate(config: RunConfig, world: World, options: ProfileOptions) -> Profile:
    assert options.cluster is not None
    cluster = load_cluster_or_preset(options.cluster)
    ingredients = ingredients_of(config, world, cluster)
    return estimate_profile(ingredients, cluster, options.device, options.cluster)


def _measure(
    config: RunConfig,
    world: World,
    options: ProfileOptions,
    transport: Transport,
    log_line: Callable[[str], None],
) -> Profile:
    cluster = None
    if options.cluster is not None:  # rank 0 reads it, because not every disk is shared
        cluster = broadcast_cluster(load_cluster_or_preset(options.cluster), transport)
    ingredients = ingredients_of(config, world, cluster)
    types, strategy = ingredients.types, ingredients.strategy
    kind = BlockConfig(types, options.device, strategy.algorithm)
    # The link comes first, because the size of units depends on it.
    if cluster is None:
        link = measure_link(transport, kind, options.repeats, log_line)
    else:
        lanes = num_lanes(cluster.mesh, options.device, strategy.algorithm)
        link = link_from_cluster(cluster, lanes=lanes)
    unit_bytes = target_unit_bytes(strategy, link)
    model = ingredients.model.to(types.compute).to(options.device)
    batch = _to_device(ingredients.batch, options.device)
    setup = BenchSetup(config, transport, model, batch, options.device)
    sample = SampleStep(lambda: setup.compute_loss(model), batch)
    units = ingredients.find_units(model, _find_called_modules(config, model, sample), unit_bytes)
    log_line(f"{len(units)} units, {options.repeats} steps")
    costs = max_over_ranks(measure_units(model, units, sample, options.repeats), transport)
    log_line("steps during messages, and the update")
    slowdown = _measure_slowdown(sample, units, transport, kind, options.repeats)
    update_s = measure_update(_optimizer(config, units, types.master), options.repeats)
    found = Profile(
        units=tuple(costs),
        link=link.model_copy(update={"copies": options.device == "cpu"}),
        slowdown=slowdown,
        update_s=all_reduce_max(update_s, transport),
        other_bytes=other_bytes(model, batch),
        source=f"measured on {options.device}, {transport.mesh.shape}{_link_note(options)}",
        unit_bytes=unit_bytes,
        **element_widths(ingredients),
    )
    found = add_allocator_overhead(found, options.device)
    if cluster is not None or transport.size == 1:
        return found
    # Calibration steps start from the parameters of the run, not from those cast to its types.
    full_model = build_model(config.model, config.run.seed).to(options.device)
    setup = replace(setup, model=full_model)
    found = fit_profile(
        found, time_calibration_steps(setup, found, strategy, options.repeats, log_line)
    )
    return correct_generated_plans(
        found, time_generated_plans(setup, found, strategy, options.repeats, log_line)
    )


def _link_note(options: ProfileOptions) -> str:
    return "" if options.cluster is None else f", link of {options.cluster}"


def _to_device(batch: tuple[Tensor, Tensor], device: str) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return inputs.to(device), targets.to(device)


def _find_called_modules(
    config: RunConfig, model: nn.Module, sample: SampleStep
) -> tuple[str, ...]:
    """Return the names of the modules that a forward calls.

    Raises:
        ConfigError: The model does not run on the data.
    """
    try:
        with torch.no_grad():
            return called_modules(model, sample.forward)
    except StrettoError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"model.kind = {config.model.kind!r} cannot learn data.kind = {config.data.kind!r}: "
            f"a trial failed: {reason}"
        ) from error


def _optimizer(config: RunConfig, units: Sequence[ModelUnit], master: torch.dtype) -> Optimizer:
    """Return the run's optimizer for copies of all parameters in the type ``master``."""
    copies = [
        nn.Parameter(parameter.detach().to(master, copy=True))
        for unit in units
        for parameter in unit.parameters
    ]
    return make_optimizer(config.optim, peak_lr=_LR)(copies)


def measure_link(
    transport: Transport, kind: BlockConfig, repeats: int, log_line: Callable[[str], None]
) -> Link:
    """Measure the link with messages like those of a run; all ranks call this together."""
    across = _measure_message_costs(transport, kind, repeats, log_line)
    inside = None
    if is_hierarchical(transport.mesh):
        log_line("the same inside hosts")
        inside = _measure_message_costs(transport, replace(kind, in_host=True), repeats, log_line)
    lanes = num_lanes(transport.mesh, kind.device, kind.algorithm)
    link = link_from_costs(transport.mesh, across, inside, lanes=lanes)
    large = BlockTraffic(transport, kind, _LARGE_BLOCK_BYTES)
    try:
        return link.model_copy(update={"lane_share": large.measure_lane_share()})
    finally:
        large.close()


def _measure_message_costs(
    transport: Transport, kind: BlockConfig, repeats: int, log_line: Callable[[str], None]
) -> LatencyBandwidth:
    blocks_by_size: dict[int, BlockTraffic] = {}

    def seconds_of(num_bytes: int) -> float:
        if num_bytes not in blocks_by_size:  # one size at a time: the largest take much memory
            _close_all(blocks_by_size)
            blocks_by_size[num_bytes] = BlockTraffic(transport, kind, num_bytes)
        return blocks_by_size[num_bytes].measure_seconds()

    try:
        return measure_message_cost(seconds_of, repeats=repeats, log_line=log_line)
    finally:
        _close_all(blocks_by_size)


def _close_all(blocks_by_size: dict[int, BlockTraffic]) -> None:
    for blocks in blocks_by_size.values():
        blocks.close()
    blocks_by_size.clear()


def _measure_slowdown(
    sample: SampleStep,
    units: Sequence[ModelUnit],
    transport: Transport,
    kind: BlockConfig,
    repeats: int,
) -> float:
    if transport.size == 1:
        return 1.0

    def step() -> None:
        sample.forward().backward()
        for unit in units:
            for parameter in unit.parameters:
                parameter.grad = None

    blocks = BlockTraffic(transport, kind, _TRAFFIC_BLOCK_BYTES)
    try:
        return measure_slowdown(
            step, blocks.traffic, transport, repeats=repeats, device=kind.device
        )
    finally:
        blocks.close()


def write_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` as JSON, and check that it is read back equal.

    Raises:
        StrettoError: It is not.
    """
    write_atomically(path, profile.model_dump_json(indent=1) + "\n")
    if read_profile(path) != profile:
        raise StrettoError(f"{path} does not hold what was written into it")

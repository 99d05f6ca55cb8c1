"""Measure seconds and peak bytes of a training step: Stretto, its peers, and the lower bound."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from stretto.bench.peers import (
    DDP,
    NO_COMMUNICATION,
    BenchSetup,
    PeerProcessGroup,
    missing_peer_notices,
    parse_peers,
    step_builders,
)
from stretto.cluster.world import Mesh, World
from stretto.collectives.codecs import WIRE_DTYPES, parse_wire
from stretto.comm.connect import connect
from stretto.data import open_sample_source
from stretto.models import GPTConfig, build_model
from stretto.planner.plan import ElementBytes, Plan, Sharding, Unit
from stretto.profiler.interleaved_timing import (
    STEPS_PER_TIMING,
    BenchmarkRow,
    StepRunner,
    all_reduce_max,
    spread,
    time_steps_interleaved,
)
from stretto.profiler.meters import peak_bytes
from stretto.run import RunConfig
from stretto.strategies import GossipConfig, LocalConfig
from stretto.strategies.gossip.groups import num_groups
from stretto.strategies.sharded.config import ShardedConfig, checked_plan


def min_link_bytes(plan: Plan, element_bytes: ElementBytes, hosts: int) -> float:
    """Return the bytes that one host must send, and receive, in a step of ``plan``.

    It holds for any algorithm, so it gives a lower bound on the time of the step.
    """
    return (hosts - 1) / hosts * sum(_transferred_bytes(unit, element_bytes) for unit in plan.units)


def _transferred_bytes(unit: Unit, element_bytes: ElementBytes) -> int:
    """Return the bytes of a unit that cross the links in a step, each crossing counted."""
    if unit.in_host or unit.sharding is Sharding.DP:  # only gradients: an all-reduce
        return 2 * unit.numel * element_bytes.gradient
    gathers = 2 if unit.sharding is Sharding.ZERO3 else 1
    return unit.numel * (element_bytes.gradient + gathers * element_bytes.parameter)


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """How steps are timed."""

    runs: int
    """Interleaved repetitions."""
    steps: int = STEPS_PER_TIMING
    """Steps that are timed together."""


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """The measurements of each step runner, by name."""

    seconds: Mapping[str, list[float]]
    """Seconds of a step in each round."""
    peaks: Mapping[str, int]
    """Peak bytes of live tensors, on the rank with the most."""


def bench_step(
    config: RunConfig,
    world: World,
    *,
    timing: TimingOptions,
    log_line: Callable[[str], None],
    peers: str = "",
    device: str = "cpu",
) -> list[BenchmarkRow]:
    """Measure a step of Stretto and its peers, interleaved; all ranks call this together.

    Args:
        config: The run; its strategy is the one measured.
        world: This rank and its mesh.
        timing: Number of rounds and steps.
        log_line: Receives progress.
        peers: Names of peers, see `parse_peers`.
        device: "cpu" (Gloo) or "cuda" (NCCL).
    """
    peer_names = parse_peers(peers, config)
    torch.set_num_threads(config.run.threads or world.threads)
    transport = connect(world, config.run.timeout_s, device=device)
    model = build_model(config.model, config.run.seed).to(device)
    inputs, targets = synthetic_batch(config, world)
    setup = BenchSetup(config, transport, model, (inputs.to(device), targets.to(device)), device)
    for line in missing_peer_notices(config):
        log_line(line)
    make_builders = partial(step_builders, setup, peer_names=peer_names)
    peaks = measure_peak_bytes(setup, world, make_builders, log_line)
    times = time_steps(setup, world, make_builders, timing, log_line)
    transport.close()
    return _result_rows(config, world, model, StepMeasurements(times, peaks))


StepBuildersFactory = Callable[[PeerProcessGroup], dict[str, Callable[[], StepRunner]]]
"""Returns the builders of step runners by name, given the peers' process group."""


def measure_peak_bytes(
    setup: BenchSetup,
    world: World,
    make_builders: StepBuildersFactory,
    log_line: Callable[[str], None],
) -> dict[str, int]:
    """Return the peak bytes of each step runner, measured while no other runner exists.

    On CPUs the peers use a fake process group: Gloo frees tensors on threads that cannot be
    followed, and its internal copies are not the peers' memory. Stretto communicates as always.
    """
    peaks: dict[str, int] = {}
    with PeerProcessGroup(world, setup.device, fake=setup.device == "cpu") as peers:
        builders = make_builders(peers)
        if setup.device == "cuda":  # allocates the workspaces of libraries
            peak_bytes(builders[NO_COMMUNICATION], setup.device)
        for name, builder in builders.items():
            peaks[name] = round(all_reduce_max(peak_bytes(builder, setup.device), setup.transport))
            log_line(f"{name}: {peaks[name] / 1e6:.1f} MB")
    return peaks


def time_steps(
    setup: BenchSetup,
    world: World,
    make_builders: StepBuildersFactory,
    timing: TimingOptions,
    log_line: Callable[[str], None],
) -> dict[str, list[float]]:
    """Return the seconds of a step of each runner, in every round."""
    with PeerProcessGroup(world, setup.device) as peers:
        built_steps = {name: builder() for name, builder in make_builders(peers).items()}
        times = time_steps_interleaved(
            built_steps,
            setup.transport,
            runs=timing.runs,
            steps=timing.steps,
            device=setup.device,
            log_line=log_line,
        )
        for runner in built_steps.values():
            runner.close()
    return times


def step_bound_s(num_bytes: float | None, compute_s: float, world: World) -> float | None:
    """Return a lower bound on the step: the larger of computation and link time; else None.

    ``num_bytes`` are those that every host's link must carry. None where these or the rate of the
    links are unknown.
    """
    if world.link_bits_per_s is None or num_bytes is None:
        return None
    return max(compute_s, num_bytes * 8 / world.link_bits_per_s)


def _result_rows(
    config: RunConfig, world: World, model: nn.Module, measurements: StepMeasurements
) -> list[BenchmarkRow]:
    times, kind = measurements.seconds, config.strategy.kind
    medians = {name: statistics.median(values) for name, values in times.items()}
    ddp = [name for name in times if name.startswith(DDP)]
    tuned_ddp = min(ddp, key=medians.__getitem__) if ddp else None
    others = sorted((name for name in times if name != kind), key=lambda name: name != tuned_ddp)
    mesh = world.mesh
    required_bytes = required_link_bytes(config, model, mesh.hosts, per_host=mesh.ranks_per_host[0])
    bound = step_bound_s(required_bytes, medians[NO_COMMUNICATION], world)
    return [
        BenchmarkRow(
            _case_name(config, world, model),
            medians[kind],
            name + " (tuned)" * (name == tuned_ddp),
            medians[name],
            bound,
            len(times[kind]),
            spread(times[kind]),
            measurements.peaks[kind],
            measurements.peaks[name],
        )
        for name in others
    ]


def _case_name(config: RunConfig, world: World, model: nn.Module) -> str:
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    shape = f"{world.mesh.hosts}x{world.mesh.ranks_per_host[0]}"
    plan = f", {config.strategy.plan}" if isinstance(config.strategy, ShardedConfig) else ""
    return f"{config.model.kind} {num_bytes / 1e6:.1f} MB, {shape}{plan}"


def required_link_bytes(
    config: RunConfig, model: nn.Module, hosts: int, *, per_host: int = 1
) -> float | None:
    """Return the bytes that every host's link must carry in a step; None if not determined.

    They hold for any algorithm: an all-reduce needs about twice the bytes of the tensor, a gather
    once. They are not determined for sparse gradients, for local updates, and for gossip where
    groups are not hosts, because its traffic depends on random peers.
    """
    strategy = config.strategy
    if isinstance(strategy, GossipConfig):
        groups = num_groups(strategy.groups, Mesh((per_host,) * hosts))
        return _gossip_bytes_sent(strategy, model, hosts) if groups == hosts else None
    if isinstance(strategy, LocalConfig):
        return None  # rounds are rare: the timed steps may have none
    if not isinstance(strategy, ShardedConfig):
        num_bytes = _all_reduced_bytes(strategy.wire, model)
        return None if num_bytes is None else 2 * (hosts - 1) / hosts * num_bytes
    own = next(p.dtype for p in model.parameters() if p.requires_grad)
    compute = WIRE_DTYPES[strategy.parameters] or own
    wire = WIRE_DTYPES[strategy.wire] or compute
    return min_link_bytes(
        checked_plan(strategy, model), ElementBytes(compute.itemsize, wire.itemsize), hosts
    )


def _gossip_bytes_sent(strategy: GossipConfig, model: nn.Module, hosts: int) -> float:
    """Return the mean bytes per step that a host sends to its peers, if it is one group."""
    wire = WIRE_DTYPES[strategy.wire]
    num_bytes = sum(p.numel() * (wire or p.dtype).itemsize for p in model.parameters())
    return num_bytes * len(strategy.build_topology()(0, hosts, 0, 0).sends) / strategy.every


def _all_reduced_bytes(wire_text: str, model: nn.Module) -> float | None:
    """Return the bytes of all gradients on the wire; None where only a part is sent."""
    wire = parse_wire(wire_text)
    if wire.kept_fraction is not None:
        return None
    if wire.codec is not None:
        return sum(wire.codec.num_bytes([p.numel()]) for p in model.parameters())
    return sum(p.numel() * (wire.dtype or p.dtype).itemsize for p in model.parameters())


def synthetic_batch(config: RunConfig, world: World) -> tuple[Tensor, Tensor]:
    """Return one rank's share of a synthetic batch, so that no input pipeline is timed."""
    per_rank = max(1, config.train.batch // world.size)
    if isinstance(config.model, GPTConfig):
        shape = (per_rank, config.model.context + 1)
        generator = torch.Generator().manual_seed(world.rank)
        tokens = torch.randint(config.model.vocab, shape, generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    return open_sample_source(config.data, train=True).batch(torch.arange(per_rank).numpy())

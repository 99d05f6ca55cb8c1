"""How long a training step takes, and how much lives in it: ours, the peers, and the bound."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from stretto.cluster.world import Mesh, World
from stretto.comm.buckets import WIRE
from stretto.comm.codecs import parse_wire
from stretto.comm.connect import connect
from stretto.data import open_source
from stretto.measure.carried import link_bytes
from stretto.measure.ddp import Peers
from stretto.measure.interleave import STEPS, Contender, Row, interleave_steps, largest, spread
from stretto.measure.live_bytes import peak_bytes
from stretto.model import GPTConfig, build_model
from stretto.plan.memory import Widths
from stretto.run import RunConfig
from stretto.strategy import GossipConfig, LocalConfig
from stretto.strategy.gossip.group import num_groups
from stretto.strategy.sharded.config import ShardedConfig, checked_plan
from stretto.study.contenders import ALONE, DDP, Stage, absent_peers, chosen_peers, contenders


@dataclass(frozen=True, slots=True)
class Timing:
    """How steps are timed."""

    runs: int
    """Interleaved repetitions."""
    steps: int = STEPS
    """Steps that are timed as one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found out of each contender, by name."""

    seconds: Mapping[str, list[float]]
    """Of a step, in each round."""
    peaks: Mapping[str, int]
    """Bytes of tensors that live at once, on the rank that has the most."""


def bench_step(
    config: RunConfig,
    world: World,
    *,
    timing: Timing,
    say: Callable[[str], None],
    peers: str = "",
    device: str = "cpu",
) -> list[Row]:
    """Measure a step of every contender, interleaved; all ranks call this together."""
    wanted = chosen_peers(peers, config)
    torch.set_num_threads(config.run.threads or world.threads)
    channel = connect(world, config.run.timeout_s, device=device)
    model = build_model(config.model, config.run.seed).to(device)
    inputs, targets = fixed_batch(config, world)
    stage = Stage(config, channel, model, (inputs.to(device), targets.to(device)), device)
    for line in absent_peers(config):
        say(line)
    field = partial(contenders, stage, wanted=wanted)
    peaks = count_bytes(stage, world, field, say)
    times = time_steps(stage, world, field, timing, say)
    channel.close()
    return _rows(config, world, model, Measured(times, peaks))


Field = Callable[[Peers], dict[str, Callable[[], Contender]]]
"""What builds each contender, by name, given the peers' side of the process."""


def count_bytes(
    stage: Stage, world: World, field: Field, say: Callable[[str], None]
) -> dict[str, int]:
    """Return the most that lives in a step of each contender, which has the process to itself.

    On CPUs the peers' messages go nowhere meanwhile: Gloo lets go of tensors on threads that
    nobody can follow, and what it copies inside is not theirs. Ours go where they always do.
    """
    peaks: dict[str, int] = {}
    with Peers(world, stage.device, idle=stage.device == "cpu") as peers:
        makes = field(peers)
        if stage.device == "cuda":  # the first one pays for the workspaces of libraries
            peak_bytes(makes[ALONE], stage.device)
        for name, make in makes.items():
            peaks[name] = round(largest(peak_bytes(make, stage.device), stage.channel))
            say(f"{name}: {peaks[name] / 1e6:.1f} MB")
    return peaks


def time_steps(
    stage: Stage, world: World, field: Field, timing: Timing, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return the seconds of a step of each contender, in every round."""
    with Peers(world, stage.device) as peers:
        ready = {name: make() for name, make in field(peers).items()}
        times = interleave_steps(
            ready,
            stage.channel,
            runs=timing.runs,
            steps=timing.steps,
            device=stage.device,
            say=say,
        )
        for contender in ready.values():
            contender.close()
    return times


def bound_s(num_bytes: float | None, compute_s: float, world: World) -> float | None:
    """Return max(compute, bytes every host's link must carry / rate), where both are known."""
    if world.link_bits_per_s is None or num_bytes is None:
        return None
    return max(compute_s, num_bytes * 8 / world.link_bits_per_s)


def _rows(config: RunConfig, world: World, model: nn.Module, measured: Measured) -> list[Row]:
    times, kind = measured.seconds, config.strategy.kind
    medians = {name: statistics.median(values) for name, values in times.items()}
    ddp = [name for name in times if name.startswith(DDP)]
    tuned = min(ddp, key=medians.__getitem__) if ddp else None
    others = sorted((name for name in times if name != kind), key=lambda name: name != tuned)
    mesh = world.mesh
    carried = must_carry(config, model, mesh.hosts, per_host=mesh.ranks_per_host[0])
    bound = bound_s(carried, medians[ALONE], world)
    return [
        Row(
            _case(config, world, model),
            medians[kind],
            name + " (tuned)" * (name == tuned),
            medians[name],
            bound,
            len(times[kind]),
            spread(times[kind]),
            measured.peaks[kind],
            measured.peaks[name],
        )
        for name in others
    ]


def _case(config: RunConfig, world: World, model: nn.Module) -> str:
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    shape = f"{world.mesh.hosts}x{world.mesh.ranks_per_host[0]}"
    plan = f", {config.strategy.plan}" if isinstance(config.strategy, ShardedConfig) else ""
    return f"{config.model.kind} {num_bytes / 1e6:.1f} MB, {shape}{plan}"


def must_carry(
    config: RunConfig, model: nn.Module, hosts: int, *, per_host: int = 1
) -> float | None:
    """Return what every host's link must carry in a step; None where it depends on the gradients.

    Whatever the algorithm: a sum that everybody gets costs twice the bytes, a gather once. What
    gossip sends out of a host that is no group by itself depends on who is drawn.
    """
    strategy = config.strategy
    if isinstance(strategy, GossipConfig):
        groups = num_groups(strategy.groups, Mesh((per_host,) * hosts))
        return _told_bytes(strategy, model, hosts) if groups == hosts else None
    if isinstance(strategy, LocalConfig):
        return None  # a round comes now and then: the few steps that are timed may have none
    if not isinstance(strategy, ShardedConfig):
        num_bytes = _summed_bytes(strategy.wire, model)
        return None if num_bytes is None else 2 * (hosts - 1) / hosts * num_bytes
    own = next(p.dtype for p in model.parameters() if p.requires_grad)
    compute = WIRE[strategy.parameters] or own
    wire = WIRE[strategy.wire] or compute
    return link_bytes(checked_plan(strategy, model), Widths(compute.itemsize, wire.itemsize), hosts)


def _told_bytes(strategy: GossipConfig, model: nn.Module, hosts: int) -> float:
    """Return what a host that is a group by itself tells its peers, in the mean of all steps."""
    wire = WIRE[strategy.wire]
    num_bytes = sum(p.numel() * (wire or p.dtype).itemsize for p in model.parameters())
    return num_bytes * len(strategy.who()(0, hosts, 0, 0).sends) / strategy.every


def _summed_bytes(word: str, model: nn.Module) -> float | None:
    """Return the bytes of all gradients as they travel; None where they do not travel whole."""
    wire = parse_wire(word)
    if wire.share is not None:
        return None
    if wire.codec is not None:
        return sum(wire.codec.num_bytes([p.numel()]) for p in model.parameters())
    return sum(p.numel() * (wire.dtype or p.dtype).itemsize for p in model.parameters())


def fixed_batch(config: RunConfig, world: World) -> tuple[Tensor, Tensor]:
    """Return one rank's share of a batch, made up: what is timed is not the input pipeline."""
    per_rank = max(1, config.train.batch // world.size)
    if isinstance(config.model, GPTConfig):
        shape = (per_rank, config.model.context + 1)
        generator = torch.Generator().manual_seed(world.rank)
        tokens = torch.randint(config.model.vocab, shape, generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    return open_source(config.data, train=True).batch(torch.arange(per_rank).numpy())

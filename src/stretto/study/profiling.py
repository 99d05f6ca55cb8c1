"""A profile of a run: its model measured or estimated, its messages measured or described."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.cluster.world import World
from stretto.comm.channel import Channel
from stretto.comm.connect import connect
from stretto.errors import ConfigError, StrettoError
from stretto.measure.allocator import as_taken
from stretto.measure.interleave import largest
from stretto.measure.messages import measure_line
from stretto.measure.profile import Sample, measure_units, measure_update, other_bytes, slowest
from stretto.measure.slowdown import measure_slowdown
from stretto.model import build_model
from stretto.optim import make_optimizer
from stretto.plan.linking import Line, described, is_nested, link_from_cluster, link_of
from stretto.plan.profile import Link, Profile, read_profile
from stretto.plan.units import ModelUnit, called_modules
from stretto.run import RunConfig
from stretto.sim.cluster import Cluster
from stretto.strategy.sharded.config import ShardedConfig
from stretto.study.blocks import Blocks, Kind
from stretto.study.calibrate import of_rank_0
from stretto.study.contenders import Stage
from stretto.study.rehearsal import corrected, fitted, rehearse, try_plans
from stretto.study.step import fixed_batch
from stretto.telemetry.aside import write_aside
from stretto.train.estimated import (
    Ingredients,
    estimate_profile,
    joined_bytes,
    lanes_in,
    own_type,
    rates_of,
    widths_of,
)

_LR = 1e-3
"""Any: what an update takes does not depend on it."""
_LARGE_BYTES = 16_000_000
"""Of the blocks that tell what one lane reaches alone."""
_BUSY_BYTES = 2_000_000
"""Of the blocks that keep the link busy beside steps: about those of a run."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How a profile is made."""

    repeats: int = 9
    """Steps that are timed, and messages of each size."""
    device: str = "cpu"
    cluster: str | None = None
    """A description, or a name: where the link is from instead of messages."""
    estimate: bool = False
    """Whether the model's operations are counted instead of run; at the device's rates, then."""


def profile_run(
    config: RunConfig, world: World, asked: Asked, say: Callable[[str], None]
) -> Profile:
    """Return the profile of a run; all ranks call this together, and get the same.

    Raises:
        ConfigError: Nobody can know the link, or the model does not run.
    """
    check_asked(world, asked)
    torch.set_num_threads(config.run.threads or world.threads)
    if asked.estimate:
        return _estimated(config, world, asked)
    channel = connect(world, config.run.timeout_s, device=asked.device)
    try:
        return _measured(config, world, asked, channel, say)
    finally:
        channel.close()


def check_asked(world: World, asked: Asked) -> None:
    """Refuse what cannot be found out.

    Raises:
        ConfigError: Saying what is missing, and what to do.
    """
    if asked.repeats < 1:
        raise ConfigError(f"--repeats {asked.repeats}: expected at least 1")
    if asked.estimate:
        rates_of(asked.device)  # told now, if there are none
    elif asked.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {asked.device}: expected cpu (Gloo) or cuda (NCCL)")
    if asked.estimate and asked.cluster is None:
        raise ConfigError(
            "--estimate sends nothing: say what the links are with --cluster, a file of stretto "
            'calibrate or a name such as "gpu nodes 100gbit"'
        )
    if asked.cluster is None and world.size < 2:
        raise ConfigError(
            "one rank has no link to measure: start this as `stretto lab --hosts 4 --rate 400mbit "
            "-- stretto profile RUN.toml`, or under torchrun; or say what the links are with "
            "--cluster, a file of stretto calibrate or a name"
        )
    if asked.device == "cuda" and not asked.estimate and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here, or this PyTorch has no CUDA")


def ingredients_of(config: RunConfig, world: World, cluster: Cluster | None) -> Ingredients:
    """Return what a run would train, with a batch as `stretto.study.step` makes it up.

    Shares of the batch are those of a described cluster's ranks, where there is one.
    """
    if cluster is not None:
        world = replace(world, rank=world.rank % cluster.mesh.size, mesh=cluster.mesh)
    model = build_model(config.model, config.run.seed)
    inputs, targets = fixed_batch(config, world)
    most = max(config.train.piece_sizes(len(inputs), world.size))
    strategy = config.strategy
    return Ingredients(
        model=model,
        own=own_type(model),
        batch=(inputs[:most].clone(), targets[:most].clone()),
        strategy=strategy if isinstance(strategy, ShardedConfig) else ShardedConfig(),
        optim=config.optim,
        precision=config.train.precision,
    )


def _estimated(config: RunConfig, world: World, asked: Asked) -> Profile:
    assert asked.cluster is not None
    cluster = described(asked.cluster)
    ingredients = ingredients_of(config, world, cluster)
    return estimate_profile(ingredients, cluster, asked.device, asked.cluster)


def _measured(
    config: RunConfig, world: World, asked: Asked, channel: Channel, say: Callable[[str], None]
) -> Profile:
    cluster = None
    if asked.cluster is not None:  # rank 0's: not every disk is shared
        cluster = of_rank_0(described(asked.cluster), channel)
    ingredients = ingredients_of(config, world, cluster)
    types, strategy = ingredients.types, ingredients.strategy
    kind = Kind(types, asked.device, strategy.algorithm)
    # First of all: what is worth joining goes by it.
    if cluster is None:
        link = measured_link(channel, kind, asked.repeats, say)
    else:
        lanes = lanes_in(cluster.mesh, asked.device, strategy.algorithm)
        link = link_from_cluster(cluster, lanes=lanes)
    unit_bytes = joined_bytes(strategy, link)
    model = ingredients.model.to(types.compute).to(asked.device)
    batch = _moved(ingredients.batch, asked.device)
    stage = Stage(config, channel, model, batch, asked.device)
    sample = Sample(lambda: stage.loss(model), batch)
    units = ingredients.find(model, _calls(config, model, sample), unit_bytes)
    say(f"{len(units)} units, {asked.repeats} steps")
    costs = slowest(measure_units(model, units, sample, asked.repeats), channel)
    say("steps beside messages, and the update")
    slowdown = _slowdown(sample, units, channel, kind, asked.repeats)
    update_s = measure_update(_optimizer(config, units, types.kept), asked.repeats)
    found = Profile(
        units=tuple(costs),
        link=link.model_copy(update={"copies": asked.device == "cpu"}),
        slowdown=slowdown,
        update_s=largest(update_s, channel),
        other_bytes=other_bytes(model, batch),
        source=f"measured on {asked.device}, {channel.mesh.shape}{_told(asked)}",
        unit_bytes=unit_bytes,
        **widths_of(ingredients),
    )
    found = as_taken(found, asked.device)
    if cluster is not None or channel.size == 1:
        return found
    whole = build_model(config.model, config.run.seed).to(asked.device)
    stage = replace(stage, model=whole)
    found = fitted(found, rehearse(stage, found, strategy, asked.repeats, say))
    return corrected(found, try_plans(stage, found, strategy, asked.repeats, say))


def _told(asked: Asked) -> str:
    return "" if asked.cluster is None else f", link of {asked.cluster}"


def _moved(batch: tuple[Tensor, Tensor], device: str) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return inputs.to(device), targets.to(device)


def _calls(config: RunConfig, model: nn.Module, sample: Sample) -> tuple[str, ...]:
    """Return the modules that a forward calls.

    Raises:
        ConfigError: It cannot be run.
    """
    try:
        with torch.no_grad():
            return called_modules(model, sample.forward)
    except StrettoError:
        raise
    except Exception as wrong:
        reason = f"{type(wrong).__name__}: {wrong}".splitlines()[0]
        raise ConfigError(
            f"model.kind = {config.model.kind!r} cannot learn data.kind = {config.data.kind!r}: "
            f"a trial failed: {reason}"
        ) from wrong


def _optimizer(config: RunConfig, units: Sequence[ModelUnit], kept: torch.dtype) -> Optimizer:
    """Return the run's optimizer for copies of all parameters, in the type that is updated."""
    copies = [
        nn.Parameter(parameter.detach().to(kept, copy=True))
        for unit in units
        for parameter in unit.parameters
    ]
    return make_optimizer(config.optim, peak_lr=_LR)(copies)


def measured_link(channel: Channel, kind: Kind, repeats: int, say: Callable[[str], None]) -> Link:
    """Return the link of the ranks at hand, by messages like those of a run; all together."""
    across = _line(channel, kind, repeats, say)
    inside = None
    if is_nested(channel.mesh):
        say("the same inside hosts")
        inside = _line(channel, replace(kind, in_host=True), repeats, say)
    lanes = lanes_in(channel.mesh, kind.device, kind.algorithm)
    link = link_of(channel.mesh, across, inside, lanes=lanes)
    large = Blocks(channel, kind, _LARGE_BYTES)
    try:
        return link.model_copy(update={"lane_share": large.lane_share()})
    finally:
        large.close()


def _line(channel: Channel, kind: Kind, repeats: int, say: Callable[[str], None]) -> Line:
    there: dict[int, Blocks] = {}

    def seconds_of(num_bytes: int) -> float:
        if num_bytes not in there:  # one size at a time: the largest take room
            _close(there)
            there[num_bytes] = Blocks(channel, kind, num_bytes)
        return there[num_bytes].seconds()

    try:
        return measure_line(seconds_of, repeats=repeats, say=say)
    finally:
        _close(there)


def _close(there: dict[int, Blocks]) -> None:
    for blocks in there.values():
        blocks.close()
    there.clear()


def _slowdown(
    sample: Sample, units: Sequence[ModelUnit], channel: Channel, kind: Kind, repeats: int
) -> float:
    if channel.size == 1:
        return 1.0

    def step() -> None:
        sample.forward().backward()
        for unit in units:
            for parameter in unit.parameters:
                parameter.grad = None

    blocks = Blocks(channel, kind, _BUSY_BYTES)
    try:
        return measure_slowdown(step, blocks.traffic, channel, repeats=repeats, device=kind.device)
    finally:
        blocks.close()


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile, and make sure that it is read back equal."""
    write_aside(path, profile.model_dump_json(indent=1) + "\n")
    if read_profile(path) != profile:
        raise StrettoError(f"{path} does not hold what was written into it")

"""A profile of a run: its model measured or estimated, its messages measured or described."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.cluster.world import World
from stretto.comm.buckets import WIRE
from stretto.comm.channel import Channel
from stretto.comm.connect import connect
from stretto.errors import ConfigError, StrettoError
from stretto.measure.estimate import Rates, Subject, estimate_units, on_meta, parse_rates
from stretto.measure.interleave import largest
from stretto.measure.messages import measure_line
from stretto.measure.profile import (
    Sample,
    measure_units,
    measure_update,
    other_bytes,
    remembered_bytes,
    slowest,
)
from stretto.measure.slowdown import measure_slowdown
from stretto.model import build_model, per_sample_loss
from stretto.optim import make_optimizer
from stretto.plan.linking import Line, described, is_nested, link_from_cluster, link_of
from stretto.plan.profile import Link, Profile, read_profile
from stretto.plan.units import ModelUnit, called_modules, find_units
from stretto.run import RunConfig
from stretto.sim.cluster import Cluster
from stretto.strategy.sharded.config import UNIT_BYTES, ShardedConfig
from stretto.strategy.sharded.storage import Types
from stretto.study.blocks import Blocks, Kind, lanes_of
from stretto.study.calibrate import of_rank_0
from stretto.study.contenders import Stage
from stretto.study.step import fixed_batch
from stretto.telemetry.aside import write_aside
from stretto.train.precision import HALF

_LR = 1e-3
"""Any: what an update takes does not depend on it."""
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

    @property
    def rates(self) -> Rates:
        """The rates of the device, by its name or as two figures."""
        return parse_rates("h200" if self.device == "cuda" else self.device)


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
        _ = asked.rates  # told now, if there are none
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


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a run computes, on one rank of those that it is planned for."""

    config: RunConfig
    sharded: ShardedConfig
    model: nn.Module
    """In the type in which it computes."""
    batch: tuple[Tensor, Tensor]
    types: Types
    unit_bytes: int
    """Up to which neighbours are joined."""
    own: torch.dtype
    """The type in which the model was built: units are found by it."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean loss of ``model`` on ``batch``."""
        inputs, targets = batch
        return per_sample_loss(model(inputs), targets).mean()

    def find(self, model: nn.Module, calls: Sequence[str]) -> list[ModelUnit]:
        """Return the units that a run of ``model`` has."""
        return find_units(model, self.unit_bytes // self.own.itemsize, calls)


def _subject(config: RunConfig, world: World, cluster: Cluster | None) -> _Subject:
    """Build model and batch as `stretto.study.step` does, and the types as a strategy would.

    Shares of the batch are those of a described cluster's ranks, where there is one.
    """
    if cluster is not None:
        world = replace(world, rank=world.rank % cluster.mesh.size, mesh=cluster.mesh)
    own_strategy = config.strategy
    sharded = own_strategy if isinstance(own_strategy, ShardedConfig) else ShardedConfig()
    model = build_model(config.model, config.run.seed)
    own = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
    compute = WIRE[sharded.parameters] or own
    kept = own if own.itemsize >= 4 else torch.float32
    types = Types(compute, WIRE[sharded.wire] or compute, kept)
    inputs, targets = fixed_batch(config, world)
    pieces = config.train.piece_sizes(len(inputs), world.size)
    batch = inputs[: max(pieces)].clone(), targets[: max(pieces)].clone()
    # Not what a file says that may be the one to be made.
    unit = UNIT_BYTES if sharded.unit is None else sharded.unit
    return _Subject(config, sharded, model.to(compute), batch, types, unit, own)


def _measured(
    config: RunConfig, world: World, asked: Asked, channel: Channel, say: Callable[[str], None]
) -> Profile:
    cluster = None
    if asked.cluster is not None:  # rank 0's: not every disk is shared
        cluster = of_rank_0(described(asked.cluster), channel)
    subject = _subject(config, world, cluster)
    model, batch = subject.model.to(asked.device), _moved(subject.batch, asked.device)
    stage = Stage(config, channel, model, batch, asked.device)
    sample = Sample(lambda: stage.loss(model), batch)
    units = subject.find(model, _calls(config, model, sample))
    say(f"{len(units)} units, {asked.repeats} steps")
    costs = slowest(measure_units(model, units, sample, asked.repeats), channel)
    kind = Kind(subject.types, asked.device, subject.sharded.algorithm)
    if cluster is None:
        link = measured_link(channel, kind, asked.repeats, say)
    else:
        link = link_from_cluster(cluster, lanes=lanes_of(cluster.mesh, kind))
    say("steps beside messages, and the update")
    slowdown = _slowdown(sample, units, channel, kind, asked.repeats)
    update_s = measure_update(_optimizer(config, units, subject.types.kept), asked.repeats)
    return Profile(
        units=tuple(costs),
        link=link,
        slowdown=slowdown,
        update_s=largest(update_s, channel),
        other_bytes=other_bytes(model, batch),
        source=f"measured on {asked.device}, {channel.mesh.shape}{_told(asked)}",
        unit_bytes=subject.unit_bytes,
        **_widths(subject),
    )


def _estimated(config: RunConfig, world: World, asked: Asked) -> Profile:
    assert asked.cluster is not None
    cluster, rates = described(asked.cluster), asked.rates
    subject = _subject(config, world, cluster)
    device = "cpu" if asked.device == "cpu" else "cuda"
    kind = Kind(subject.types, device, subject.sharded.algorithm)
    # Nobody casts tensors without numbers while they run: everything is of that type.
    half = HALF.get(config.train.precision)
    model = on_meta(subject.model) if half is None else on_meta(subject.model).to(half)
    dtype = next(p.dtype for p in model.parameters())
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in subject.batch)
    costs = estimate_units(Subject(model, subject.loss, batch, subject.find), rates)
    widths = _widths(subject)
    # An update reads gradients, reads and writes what is kept and remembered.
    moved = 3 * widths["kept_bytes"] + 2 * widths["state_bytes"]
    return Profile(
        units=tuple(costs),
        link=link_from_cluster(cluster, lanes=lanes_of(cluster.mesh, kind)),
        update_s=moved * sum(cost.numel for cost in costs) / rates.bytes_per_s,
        other_bytes=other_bytes(subject.model, batch),
        source=f"estimated at the rates of {asked.device}{_told(asked)}",
        unit_bytes=subject.unit_bytes,
        **widths,
    )


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


def _widths(subject: _Subject) -> dict[str, int]:
    """Return the bytes of one element, as a strategy keeps and sends it."""
    # The smallest that has rows: what is remembered of an element is the same for all.
    one = nn.Parameter(torch.zeros(4, 4, dtype=subject.types.kept))
    optimizer = make_optimizer(subject.config.optim, peak_lr=_LR)([one])
    one.grad = torch.ones_like(one)
    optimizer.step()
    return {
        "parameter_bytes": subject.types.compute.itemsize,
        "gradient_bytes": subject.types.wire.itemsize,
        "kept_bytes": subject.types.kept.itemsize,
        "state_bytes": remembered_bytes(optimizer),
    }


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
    return link_of(channel.mesh, across, inside, lanes=lanes_of(channel.mesh, kind))


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

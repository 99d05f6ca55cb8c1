"""Plans that were made beside presets and FSDP2, on the ranks at hand: seconds, bytes, promises.

Budgets are those of presets: low is what zero3 needs that gathers one unit ahead, high what zero2
needs, middle their mean. Presets wait for all gradients before the update and gather as soon as
they may; ``dear`` does neither.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from stretto.cluster.world import World
from stretto.comm.connect import connect
from stretto.errors import ConfigError
from stretto.measure.ddp import Peers
from stretto.measure.interleave import Contender, spread
from stretto.model import build_model
from stretto.plan.footprint import Footprints
from stretto.plan.profile import Profile, read_profile
from stretto.plan.timing import time_plan
from stretto.plan.value import Plan
from stretto.run import RunConfig
from stretto.strategy.sharded.config import ShardedConfig
from stretto.study.contenders import ALONE, FSDP2, Ours, Plain, Stage, alone, contenders
from stretto.study.step import count_bytes, fixed_batch, time_steps

PLANNED = "planned"
EAGER = {
    "ddp": ("ddp", None),
    "zero2, 1 ahead": ("zero2", 1),
    "zero2, 2 ahead": ("zero2", 2),
    "zero3, 1 ahead": ("zero3", 1),
    "zero3, 2 ahead": ("zero3", 2),
}
"""By what each is called: the preset, and how many units ahead it gathers."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one contender did, and what was told of it before."""

    name: str
    step_s: float
    spread: float
    live_bytes: int
    """The most that lived at once, on the rank that had most."""
    told_s: float | None = None
    told_bytes: int | None = None
    budget: int | None = None
    """What it was planned for."""


@dataclass(frozen=True, slots=True)
class _Built:
    """A contender of ours, with its plan as it runs."""

    make: Callable[[], Ours]
    plan: Plan
    budget: int | None = None


def bench_plans(
    config: RunConfig,
    world: World,
    profile_path: Path,
    *,
    runs: int,
    device: str,
    say: Callable[[str], None],
) -> list[Seen]:
    """Measure plans for three budgets, presets and FSDP2, interleaved; all ranks together."""
    profile = read_profile(profile_path)
    if profile.link.ranks != world.size:
        raise ConfigError(
            f"{profile_path} is a profile of {profile.link.ranks} ranks, here are {world.size}: "
            "make it anew on these"
        )
    torch.set_num_threads(config.run.threads or world.threads)
    channel = connect(world, config.run.timeout_s, device=device)
    model = build_model(config.model, config.run.seed).to(device)
    inputs, targets = fixed_batch(config, world)
    stage = Stage(config, channel, model, (inputs.to(device), targets.to(device)), device)
    with TemporaryDirectory() as folder:
        built = _built(stage, profile, profile_path, Path(folder), say)
        field = partial(_makes, stage, built)
        peaks = count_bytes(stage, world, field, say)
        times = time_steps(stage, world, field, runs, say)
    channel.close()
    return [_seen(name, times[name], peaks[name], built.get(name), profile) for name in times]


def as_rows(seen: list[Seen]) -> list[dict[str, object]]:
    """Return what was seen as plain values."""
    return [asdict(one) for one in seen]


def _built(
    stage: Stage, profile: Profile, profile_path: Path, folder: Path, say: Callable[[str], None]
) -> dict[str, _Built]:
    """Return our contenders by name, each attached once to see its plan.

    Plans are kept in ``folder``, so that each is made once.
    """
    given = stage.config.strategy
    base = given if isinstance(given, ShardedConfig) else ShardedConfig()
    base = base.model_copy(update={"unit": profile.unit_bytes})
    makes: dict[str, tuple[ShardedConfig, bool, int | None]] = {
        name: (base.model_copy(update={"plan": plan, "prefetch": ahead}), True, None)
        for name, (plan, ahead) in EAGER.items()
    }
    makes["dear"] = (base.model_copy(update={"plan": "dear"}), False, None)
    built = {name: _build(stage, *how) for name, how in makes.items()}
    footprints = Footprints(profile)
    low = footprints.peak(built["zero3, 1 ahead"].plan)
    high = footprints.peak(built["zero2, 1 ahead"].plan)
    barrier = stage.config.train.reads_gradients
    for word, budget in (("low", low), ("middle", (low + high) // 2), ("high", high)):
        update = {"memory": budget, "profile": str(profile_path)}
        made = _build(stage, base.model_copy(update=update), barrier, budget)
        file = folder / f"{word}.json"
        file.write_text(made.plan.to_json(), encoding="utf-8")
        by_file = base.model_copy(update={"plan": str(file)})
        built[f"{PLANNED}, {word}"] = _build(stage, by_file, barrier, budget)
        say(f"planned for {budget / 1e6:.1f} MB")
    return built


def _build(
    stage: Stage, strategy: ShardedConfig, barrier: bool, budget: int | None = None
) -> _Built:
    first = Ours(stage, strategy, barrier=barrier)
    plan = first.plan
    first.close()
    return _Built(lambda: Ours(stage, strategy, barrier=barrier), plan, budget)


def _makes(
    stage: Stage, built: Mapping[str, _Built], peers: Peers
) -> dict[str, Callable[[], Contender]]:
    makes: dict[str, Callable[[], Contender]] = {ALONE: lambda: Plain(stage, alone(stage))}
    makes |= {name: one.make for name, one in built.items()}
    fsdp2 = contenders(stage, peers, (FSDP2,))
    return makes | {name: make for name, make in fsdp2.items() if name.startswith(FSDP2)}


def _seen(name: str, times: list[float], live: int, built: _Built | None, profile: Profile) -> Seen:
    median_s = statistics.median(times)
    if built is None:
        return Seen(name, median_s, spread(times), live)
    return Seen(
        name,
        median_s,
        spread(times),
        live,
        time_plan(built.plan, profile).step_s,
        Footprints(profile).peak(built.plan),
        built.budget,
    )

"""Plans that were made beside presets and FSDP2, on the ranks at hand: seconds, bytes, promises.

Budgets are those of presets: low is what zero3 needs that gathers one unit ahead, high what zero2
needs, middle their mean. Presets wait for all gradients before the update and gather as soon as
they may; ``dear`` does neither. Or the middle budget is split by hand, so much of it for keeping
parameters and the rest for messages ahead of time, beside the plan that splits it itself.
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
from stretto.plan.handsplit import even_shares, split_curve
from stretto.plan.options import Allowed
from stretto.plan.profile import Profile, read_profile
from stretto.plan.timing import time_plan
from stretto.plan.value import Plan
from stretto.run import RunConfig
from stretto.strategy.sharded.config import ShardedConfig
from stretto.study.contenders import ALONE, FSDP2, Ours, Plain, Stage, alone, contenders
from stretto.study.step import Timing, count_bytes, fixed_batch, time_steps

PLANNED, SPLIT = "planned", "split"
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
class Asked:
    """What is to be measured."""

    runs: int = 5
    device: str = "cpu"
    shares: int = 0
    """In how many ways a budget is split by hand, if at all; nobody else is measured then."""


@dataclass(frozen=True, slots=True)
class _Built:
    """A contender of ours, with its plan as it runs."""

    make: Callable[[], Ours]
    plan: Plan
    budget: int | None = None


def bench_plans(
    config: RunConfig, world: World, profile_path: Path, asked: Asked, say: Callable[[str], None]
) -> list[Seen]:
    """Measure plans for three budgets, presets and FSDP2, interleaved; all ranks together.

    Or, where shares are asked for, the plan for the middle one and splits of it by hand.
    """
    if asked.shares < 0:
        raise ConfigError(f"--shares {asked.shares}: expected how many, or 0 for none")
    profile = read_profile(profile_path)
    if profile.link.ranks != world.size:
        raise ConfigError(
            f"{profile_path} is a profile of {profile.link.ranks} ranks, here are {world.size}: "
            "make it anew on these"
        )
    torch.set_num_threads(config.run.threads or world.threads)
    device = asked.device
    channel = connect(world, config.run.timeout_s, device=device)
    model = build_model(config.model, config.run.seed).to(device)
    inputs, targets = fixed_batch(config, world)
    stage = Stage(config, channel, model, (inputs.to(device), targets.to(device)), device)
    with TemporaryDirectory() as folder:
        builder = _Builder(stage, profile, profile_path, Path(folder))
        built = builder.by_hand(asked.shares, say) if asked.shares else builder.everybody(say)
        field = partial(_makes, stage, built, peers_too=not asked.shares)
        peaks = count_bytes(stage, world, field, say)
        times = time_steps(stage, world, field, Timing(asked.runs), say)
    channel.close()
    return [_seen(name, times[name], peaks[name], built.get(name), profile) for name in times]


def as_rows(seen: list[Seen]) -> list[dict[str, object]]:
    """Return what was seen as plain values."""
    return [asdict(one) for one in seen]


class _Builder:
    """Makes our contenders, each attached once to see its plan; plans are kept in ``folder``."""

    def __init__(self, stage: Stage, profile: Profile, path: Path, folder: Path) -> None:
        self._stage, self._profile, self._path, self._folder = stage, profile, path, folder
        given = stage.config.strategy
        base = given if isinstance(given, ShardedConfig) else ShardedConfig()
        self._base = base.model_copy(update={"unit": profile.unit_bytes})
        self._barrier = stage.config.train.reads_gradients
        self._eager = {
            name: self._build({"plan": plan, "prefetch": ahead}, barrier=True)
            for name, (plan, ahead) in EAGER.items()
        }
        footprints = Footprints(profile)
        low = footprints.peak(self._eager["zero3, 1 ahead"].plan)
        high = footprints.peak(self._eager["zero2, 1 ahead"].plan)
        self._budgets = {"low": low, "middle": (low + high) // 2, "high": high}

    def everybody(self, say: Callable[[str], None]) -> dict[str, _Built]:
        """Return presets, and plans for all budgets, by name."""
        built = {**self._eager, "dear": self._build({"plan": "dear"}, barrier=False)}
        for word in self._budgets:
            built[f"{PLANNED}, {word}"] = self._planned(word, say)
        return built

    def by_hand(self, count: int, say: Callable[[str], None]) -> dict[str, _Built]:
        """Return the plan for the middle budget, and those of shares of it, by name."""
        built = {f"{PLANNED}, middle": self._planned("middle", say)}
        budget = self._budgets["middle"]
        allowed = Allowed(barrier=self._barrier)
        shares = even_shares(self._profile, budget, count, allowed)
        for point in split_curve(self._profile, budget, shares, allowed):
            name = f"{SPLIT}, {point.share_bytes / budget:.0%}"
            built[name] = self._kept(name, point.plan, budget)
            say(f"{name} of {budget / 1e6:.1f} MB for keeping parameters")
        return built

    def _planned(self, word: str, say: Callable[[str], None]) -> _Built:
        budget = self._budgets[word]
        update = {"memory": budget, "profile": str(self._path)}
        made = self._build(update, barrier=self._barrier, budget=budget)
        say(f"planned for {budget / 1e6:.1f} MB")
        return self._kept(word, made.plan, budget)

    def _kept(self, name: str, plan: Plan, budget: int) -> _Built:
        """Return a plan as a file, so that it is made once."""
        file = self._folder / f"{name}.json"
        file.write_text(plan.to_json(), encoding="utf-8")
        return self._build({"plan": str(file)}, barrier=self._barrier, budget=budget)

    def _build(
        self, update: Mapping[str, object], *, barrier: bool, budget: int | None = None
    ) -> _Built:
        stage, strategy = self._stage, self._base.model_copy(update=update)
        first = Ours(stage, strategy, barrier=barrier)
        plan = first.plan
        first.close()
        return _Built(lambda: Ours(stage, strategy, barrier=barrier), plan, budget)


def _makes(
    stage: Stage, built: Mapping[str, _Built], peers: Peers, *, peers_too: bool
) -> dict[str, Callable[[], Contender]]:
    makes: dict[str, Callable[[], Contender]] = {ALONE: lambda: Plain(stage, alone(stage))}
    makes |= {name: one.make for name, one in built.items()}
    if not peers_too:
        return makes
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

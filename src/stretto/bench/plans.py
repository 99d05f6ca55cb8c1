"""Compare planned sharding with presets and FSDP2: measured and predicted seconds and bytes.

The memory limits come from presets: "low" is the need of zero3 that gathers one unit ahead, "high"
that of zero2, and "middle" their mean. Presets wait for all gradients before the update and gather
as soon as possible; ``dear`` does neither. Alternatively the middle limit is split by hand: one
share for keeping parameters, the rest for messages ahead of time. These splits are compared with
the plan that chooses the split itself.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from stretto.bench.peers import (
    FSDP2,
    NO_COMMUNICATION,
    BenchSetup,
    PeerProcessGroup,
    PyTorchStep,
    StrettoStep,
    model_without_communication,
    step_builders,
)
from stretto.bench.step import TimingOptions, measure_peak_bytes, synthetic_batch, time_steps
from stretto.cluster.world import World
from stretto.comm.connect import connect
from stretto.errors import ConfigError
from stretto.models import build_model
from stretto.planner.heuristic_split import even_shares, split_curve
from stretto.planner.memory import Footprints
from stretto.planner.plan import Plan
from stretto.planner.profile import Profile, read_profile
from stretto.planner.timing import time_plan
from stretto.planner.unit_choices import PlanConstraints
from stretto.profiler.interleaved_timing import StepRunner, spread
from stretto.renamed import with_old_keys
from stretto.run import RunConfig
from stretto.strategies.sharded.config import ShardedConfig

PLANNED, SPLIT = "planned", "split"
PREFETCHING_PRESETS = {
    "ddp": ("ddp", None),
    "zero2, 1 ahead": ("zero2", 1),
    "zero2, 2 ahead": ("zero2", 2),
    "zero3, 1 ahead": ("zero3", 1),
    "zero3, 2 ahead": ("zero3", 2),
}
"""By name: the preset, and how many units ahead it gathers."""


@dataclass(frozen=True, slots=True)
class PlanMeasurement:
    """The measured and predicted cost of one step runner."""

    name: str
    step_s: float
    spread: float
    """Interquartile range of the step times, relative to their median."""
    live_bytes: int
    """Peak live bytes, on the rank with the most."""
    predicted_s: float | None = None
    """Seconds of a step by the plan timing; None for peers."""
    predicted_bytes: int | None = None
    """Peak live bytes by the planner; None for peers."""
    memory_limit: int | None = None
    """The bytes that it was planned for; None if it was not planned."""


@dataclass(frozen=True, slots=True)
class PlanBenchOptions:
    """The options of `stretto bench plans`."""

    runs: int = 5
    device: str = "cpu"
    shares: int = 0
    """Number of splits of the memory limit by hand; 0 compares presets and FSDP2 instead."""


@dataclass(frozen=True, slots=True)
class _BuiltPlan:
    """A builder of a Stretto step, with its plan."""

    make: Callable[[], StrettoStep]
    plan: Plan
    memory_limit: int | None = None


def bench_plans(
    config: RunConfig,
    world: World,
    profile_path: Path,
    options: PlanBenchOptions,
    log_line: Callable[[str], None],
) -> list[PlanMeasurement]:
    """Measure plans, presets and FSDP2, interleaved; all ranks call this together.

    The plans are for three memory limits. If ``options.shares`` is set, only the plan for the
    middle limit and its splits by hand are measured.

    Raises:
        ConfigError: The number of shares is negative, or the profile is of other ranks.
    """
    if options.shares < 0:
        raise ConfigError(f"--shares {options.shares}: expected how many, or 0 for none")
    profile = read_profile(profile_path)
    if profile.link.ranks != world.size:
        raise ConfigError(
            f"{profile_path} is a profile of {profile.link.ranks} ranks, here are {world.size}: "
            "make it anew on these"
        )
    torch.set_num_threads(config.run.threads or world.threads)
    device = options.device
    transport = connect(world, config.run.timeout_s, device=device)
    model = build_model(config.model, config.run.seed).to(device)
    inputs, targets = synthetic_batch(config, world)
    setup = BenchSetup(config, transport, model, (inputs.to(device), targets.to(device)), device)
    with TemporaryDirectory() as folder:
        builder = _PlanBuilder(setup, profile, profile_path, Path(folder))
        built = (
            builder.build_hand_splits(options.shares, log_line)
            if options.shares
            else builder.build_all(log_line)
        )
        make_builders = partial(_step_builders, setup, built, include_peers=not options.shares)
        peaks = measure_peak_bytes(setup, world, make_builders, log_line)
        times = time_steps(setup, world, make_builders, TimingOptions(options.runs), log_line)
    transport.close()
    return [
        _measurement(name, times[name], peaks[name], built.get(name), profile) for name in times
    ]


def as_rows(measurements: list[PlanMeasurement]) -> list[dict[str, object]]:
    """Return the measurements as records for JSON, with old keys beside the new ones."""
    return [with_old_keys(asdict(one)) for one in measurements]


class _PlanBuilder:
    """Builds Stretto steps, each attached once to read its plan; writes plans to ``folder``."""

    def __init__(self, setup: BenchSetup, profile: Profile, path: Path, folder: Path) -> None:
        self._setup, self._profile, self._path, self._folder = setup, profile, path, folder
        given = setup.config.strategy
        base = given if isinstance(given, ShardedConfig) else ShardedConfig()
        self._base = base.model_copy(update={"unit": profile.unit_bytes})
        self._barrier = setup.config.train.reads_gradients
        self._presets = {
            name: self._build({"plan": plan, "prefetch": ahead}, barrier=True)
            for name, (plan, ahead) in PREFETCHING_PRESETS.items()
        }
        footprints = Footprints(profile)
        low = footprints.peak(self._presets["zero3, 1 ahead"].plan)
        high = footprints.peak(self._presets["zero2, 1 ahead"].plan)
        self._memory_limits = {"low": low, "middle": (low + high) // 2, "high": high}

    def build_all(self, log_line: Callable[[str], None]) -> dict[str, _BuiltPlan]:
        """Return presets, and plans for all memory limits, by name."""
        built = {**self._presets, "dear": self._build({"plan": "dear"}, barrier=False)}
        for level in self._memory_limits:
            built[f"{PLANNED}, {level}"] = self._build_planned(level, log_line)
        return built

    def build_hand_splits(
        self, count: int, log_line: Callable[[str], None]
    ) -> dict[str, _BuiltPlan]:
        """Return the plan for the middle memory limit, and ``count`` splits by hand, by name."""
        built = {f"{PLANNED}, middle": self._build_planned("middle", log_line)}
        limit = self._memory_limits["middle"]
        allowed = PlanConstraints(barrier=self._barrier)
        shares = even_shares(self._profile, limit, count, allowed)
        for point in split_curve(self._profile, limit, shares, allowed):
            name = f"{SPLIT}, {point.share_bytes / limit:.0%}"
            built[name] = self._build_from_file(name, point.plan, limit)
            log_line(f"{name} of {limit / 1e6:.1f} MB for keeping parameters")
        return built

    def _build_planned(self, level: str, log_line: Callable[[str], None]) -> _BuiltPlan:
        limit = self._memory_limits[level]
        update = {"memory": limit, "profile": str(self._path)}
        made = self._build(update, barrier=self._barrier, memory_limit=limit)
        log_line(f"planned for {limit / 1e6:.1f} MB")
        return self._build_from_file(level, made.plan, limit)

    def _build_from_file(self, name: str, plan: Plan, memory_limit: int) -> _BuiltPlan:
        """Return a step with ``plan`` read from a file, so that it is not planned again."""
        file = self._folder / f"{name}.json"
        file.write_text(plan.to_json(), encoding="utf-8")
        return self._build({"plan": str(file)}, barrier=self._barrier, memory_limit=memory_limit)

    def _build(
        self, update: Mapping[str, object], *, barrier: bool, memory_limit: int | None = None
    ) -> _BuiltPlan:
        setup, strategy = self._setup, self._base.model_copy(update=update)
        first = StrettoStep(setup, strategy, barrier=barrier)
        plan = first.plan
        first.close()
        return _BuiltPlan(lambda: StrettoStep(setup, strategy, barrier=barrier), plan, memory_limit)


def _step_builders(
    setup: BenchSetup,
    built: Mapping[str, _BuiltPlan],
    peers: PeerProcessGroup,
    *,
    include_peers: bool,
) -> dict[str, Callable[[], StepRunner]]:
    builders: dict[str, Callable[[], StepRunner]] = {
        NO_COMMUNICATION: lambda: PyTorchStep(setup, model_without_communication(setup))
    }
    builders |= {name: one.make for name, one in built.items()}
    if not include_peers:
        return builders
    fsdp2 = step_builders(setup, peers, (FSDP2,))
    return builders | {name: make for name, make in fsdp2.items() if name.startswith(FSDP2)}


def _measurement(
    name: str, times: list[float], live: int, built: _BuiltPlan | None, profile: Profile
) -> PlanMeasurement:
    median_s = statistics.median(times)
    if built is None:
        return PlanMeasurement(name, median_s, spread(times), live)
    return PlanMeasurement(
        name,
        median_s,
        spread(times),
        live,
        time_plan(built.plan, profile).step_s,
        Footprints(profile).peak(built.plan),
        built.memory_limit,
    )

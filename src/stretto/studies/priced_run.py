"""The inputs of a step-time prediction: a run's model, its compute timeline, and its strategy.

The compute timeline of a rank comes from a measured profile or from an estimate. It starts with the
last backward of a step and ends with the forwards before the next one: backward, update, then the
forward (and backward) of the next step's micro-batches. Inside a unit, progress is assumed to be
proportional to the number of elements.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import nn

from stretto.bench.profile_run import ingredients_of
from stretto.cluster.world import Mesh, World
from stretto.config.formatting import suggest_known_name
from stretto.errors import ConfigError
from stretto.planner.model_units import ModelUnit
from stretto.planner.profile import Profile, read_profile
from stretto.planner.timing import check_same_units
from stretto.profiler.estimate import ModelToEstimate as Estimated
from stretto.profiler.estimate import to_meta, trace_units
from stretto.recipes import load_run
from stretto.run import RunConfig
from stretto.simulator.cluster import Cluster
from stretto.strategies import STRATEGIES, AnyStrategyConfig
from stretto.strategies.sharded.config import ShardedConfig
from stretto.train.estimate_run import EstimateInputs, estimate_profile

ALL = "all"
_SMALLEST_UNITS = ShardedConfig(unit=0)
"""Splits a model into the smallest units possible, if no profile says how."""


@dataclass(frozen=True, slots=True)
class ComputeTimeline:
    """The computation of one step of a rank; seconds from the start of its last backward."""

    backward_s: float
    """Duration of the last backward."""
    update_s: float
    """Duration of the update."""
    step_s: float
    """Duration of the whole step."""
    ready_s: Mapping[str, float]
    """When each parameter's gradient is ready, by parameter name."""
    used_s: Mapping[str, float]
    """When each parameter is first used, counted from the start of the next forward."""
    slowdown: float = 1.0
    """Factor on the compute time while messages are being sent."""

    @property
    def forward_start_s(self) -> float:
        """When the next step's forward begins."""
        return self.backward_s + self.update_s

    def gradients_ready_s(self, names: Iterable[str]) -> float:
        """Return when the gradients of all parameters in ``names`` are ready."""
        return max(self.ready_s[name] for name in names)

    def first_used_s(self, names: Iterable[str]) -> float:
        """Return when the first parameter in ``names`` is used."""
        return self.forward_start_s + min(self.used_s[name] for name in names)


def build_compute_timeline(
    profile: Profile, units: Sequence[ModelUnit], micro_batches: int, compute_scale: float
) -> ComputeTimeline:
    """Return the compute timeline of a profile whose units are ``units``.

    All times of the profile are multiplied by ``compute_scale``.
    """
    ready_s, used_s = dict[str, float](), dict[str, float]()
    forward_s = 0.0
    for cost, unit in zip(profile.units, units, strict=True):
        for name, share in _offsets_in_unit(unit):
            used_s[name] = compute_scale * (forward_s + cost.forward_s * share)
        forward_s += cost.forward_s
    backward_s = 0.0
    for cost, unit in zip(profile.units[::-1], units[::-1], strict=True):
        for name, share in _offsets_in_unit(unit):
            ready_s[name] = compute_scale * (backward_s + cost.backward_s * (1 - share))
        backward_s += cost.backward_s
    total_s = micro_batches * (forward_s + backward_s) + profile.update_s
    return ComputeTimeline(
        compute_scale * backward_s,
        compute_scale * profile.update_s,
        compute_scale * total_s,
        ready_s,
        used_s,
        profile.slowdown,
    )


def _offsets_in_unit(unit: ModelUnit) -> list[tuple[str, float]]:
    """Return, for each parameter, the share of its unit's elements that lie before it."""
    elements_before, found = 0, []
    for name, parameter in zip(unit.names, unit.parameters, strict=True):
        found.append((name, elements_before / unit.numel))
        elements_before += parameter.numel()
    return found


def parse_strategy_spec(spec: str) -> tuple[str, list[str]]:
    """Split a strategy like "crossover:delay=1" into its kind and its overrides.

    Raises:
        ConfigError: The kind is unknown, or an override is not ``key=value``.
    """
    kind, *settings = spec.split(":")
    if kind == "auto":
        raise ConfigError(
            'the strategy "auto" is chosen by `stretto train` before the run; name strategies to '
            "compare, as in --strategies allreduce,sharded:plan=dear"
        )
    if kind not in STRATEGIES:
        raise ConfigError(
            f"no strategy {kind!r}{suggest_known_name(kind, list(STRATEGIES), 'known')}"
        )
    for setting in settings:
        if "=" not in setting:
            raise ConfigError(f"strategy {spec!r}: expected {kind}:key=value, got {setting!r}")
    return kind, [f"strategy.{setting}" for setting in settings]


@dataclass(frozen=True, slots=True)
class CostSource:
    """Where the times of a prediction come from."""

    cluster: Cluster
    """Links and cores; its numbers of hosts and ranks are ignored."""
    cluster_name: str
    """The displayed name of the cluster."""
    profile: Path | None = None
    """A profile file with the model's compute times; None: they are estimated."""
    device: str = "cpu"
    """The device for which times are estimated."""

    @property
    def on_gpu(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.device != "cpu"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model with its compute timeline on a given number of ranks."""

    model: nn.Module
    """The model on the meta device."""
    calls: tuple[str, ...]
    """The modules that its forward calls, in order."""
    timeline: ComputeTimeline


class _BaseDescription(NamedTuple):
    """The parts of a description that do not depend on how many ranks share the cores."""

    model: nn.Module
    calls: tuple[str, ...]
    units: tuple[ModelUnit, ...]
    profile: Profile


class PricedRun:
    """A run to price on several numbers of ranks; caches what does not depend on them."""

    def __init__(self, config: RunConfig, world: World, source: CostSource) -> None:
        self.config, self.source = config, source
        self._world = world
        self._saved_profile = None if source.profile is None else read_profile(source.profile)
        self._base_description = cache(self._describe_base)

    def description(self, mesh: Mesh, compute_scale: float = 1.0) -> ModelDescription:
        """Return the model and its timeline on ``mesh``; ``compute_scale`` multiplies all times.

        Raises:
            ConfigError: The profile is of another model, or the model does not run.
        """
        samples, num_micro_batches = self._batch_of_rank(mesh)
        base = self._base_description(samples, num_micro_batches)
        timeline = build_compute_timeline(
            base.profile,
            base.units,
            num_micro_batches,
            compute_scale * self._core_sharing_factor(mesh.size),
        )
        return ModelDescription(base.model, base.calls, timeline)

    def profile_for(self, strategy: ShardedConfig, mesh: Mesh, compute_scale: float) -> Profile:
        """Return the profile of a sharded run on ``mesh``, with the link of the cluster.

        Raises:
            ConfigError: The saved profile has other units.
        """
        cluster = self.source.cluster.with_mesh(mesh)
        ingredients = self._ingredients(strategy, *self._batch_of_rank(mesh))
        found = estimate_profile(ingredients, cluster, self.source.device, self.source.cluster_name)
        if self._saved_profile is not None:
            name = str(self.source.profile)
            check_same_units(self._saved_profile, found.shapes, name)
            found = self._saved_profile.model_copy(update={"link": found.link})
        compute_scale *= self._core_sharing_factor(mesh.size)
        units = tuple(unit.scaled(compute_scale) for unit in found.units)
        return found.model_copy(update={"units": units, "update_s": found.update_s * compute_scale})

    def _batch_of_rank(self, mesh: Mesh) -> tuple[int, int]:
        """Return the samples of a rank and the number of micro-batches."""
        samples = max(1, self.config.train.batch // mesh.size)
        return samples, self.config.train.num_micro_batches(mesh.size)

    def _core_sharing_factor(self, ranks: int) -> float:
        """Return the factor on compute time if ranks share one machine's cores.

        A saved profile already includes the sharing among its own ranks.
        """
        cpu = self.source.cluster.cpu
        if cpu.pool != "shared":
            return 1.0
        before = 1 if self._saved_profile is None else self._saved_profile.link.ranks
        return max(1.0, -(-ranks // cpu.cores)) / max(1.0, -(-before // cpu.cores))

    def _describe_base(self, samples: int, num_micro_batches: int) -> "_BaseDescription":
        unit_config = _SMALLEST_UNITS
        if self._saved_profile is not None:
            unit_config = ShardedConfig(unit=self._saved_profile.unit_bytes)
        ingredients = self._ingredients(unit_config, samples, num_micro_batches)
        units, calls = trace_units(_estimation_input(ingredients, unit_config.unit or 0))
        profile = self._saved_profile
        if profile is None:
            one_rank_cluster = self.source.cluster.with_mesh(Mesh((1,)))
            profile = estimate_profile(
                ingredients, one_rank_cluster, self.source.device, self.source.cluster_name
            )
        else:
            shapes = [unit.shape for unit in units]
            check_same_units(profile, shapes, str(self.source.profile))
        return _BaseDescription(to_meta(ingredients.model), calls, tuple(units), profile)

    def _ingredients(
        self, strategy: ShardedConfig, samples: int, num_micro_batches: int
    ) -> EstimateInputs:
        """Return the inputs to estimate one micro-batch of one rank."""
        train = self.config.train.model_copy(
            update={
                "batch": -(-samples // num_micro_batches),
                "accumulation": 1,
                "micro_batch": None,
            }
        )
        config = self.config.model_copy(update={"strategy": strategy, "train": train})
        return ingredients_of(config, replace(self._world, rank=0, mesh=Mesh((1,))), None)


def _estimation_input(ingredients: EstimateInputs, unit_bytes: int) -> Estimated:
    def find_units(model: nn.Module, calls: Sequence[str]) -> list[ModelUnit]:
        return ingredients.find_units(model, calls, unit_bytes)

    return Estimated(ingredients.model, ingredients.loss, ingredients.batch, find_units)


@dataclass(frozen=True, slots=True)
class PriceRequest:
    """The input from which one strategy is priced."""

    strategy: AnyStrategyConfig
    run: PricedRun
    description: ModelDescription
    cluster: Cluster
    """The cluster with the hosts and ranks to price."""
    compute_scale: float = 1.0
    """Factor on all compute times."""

    @property
    def timeline(self) -> ComputeTimeline:
        """The compute timeline of a rank."""
        return self.description.timeline

    @property
    def reads_gradients(self) -> bool:
        """Whether the run reads all gradients before the update, for example to clip their norm."""
        return self.run.config.train.reads_gradients


@dataclass(frozen=True, slots=True)
class StrategyVariant:
    """A run under one strategy."""

    spec: str
    """The strategy as it was requested: a kind and its settings."""
    config: RunConfig
    overrides: tuple[str, ...]
    """The overrides of the run file for this strategy."""


def find_variants(run: Path, overrides: Sequence[str], strategies: str) -> list[StrategyVariant]:
    """Return the run under each strategy of a comma-separated list.

    A strategy of the run file's own kind keeps the settings of the run file. Any other kind starts
    from its defaults, without the run file's ``strategy`` settings.

    Args:
        run: The run file.
        overrides: Overrides that apply to all strategies.
        strategies: Such as "allreduce,crossover:delay=1"; "all" for every kind; empty for the run
            file's own strategy.

    Raises:
        ConfigError: A strategy or one of its settings is unknown.
    """
    run_kind = load_run(run, overrides).config.strategy.kind
    found = [spec.strip() for spec in strategies.split(",") if spec.strip()] or [run_kind]
    specs = list(STRATEGIES) if strategies.strip() == ALL else list(dict.fromkeys(found))
    return [_variant(run, spec, run_kind, overrides) for spec in specs]


def _variant(run: Path, spec: str, run_kind: str, overrides: Sequence[str]) -> StrategyVariant:
    kind, settings = parse_strategy_spec(spec)
    common = list(overrides)
    if kind != run_kind:
        common = [one for one in overrides if not one.strip().startswith("strategy.")]
        common.append(f"strategy.kind={kind}")
    merged_overrides = (*common, *settings)
    return StrategyVariant(spec, load_run(run, merged_overrides).config, merged_overrides)

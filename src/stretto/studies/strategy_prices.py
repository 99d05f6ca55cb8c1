"""Predict the time of a training step for each strategy on each number of ranks.

`Predictor.price` lowers a strategy to its step program and prices that
(`stretto.studies.program_prices`). A sharded run is priced by the planner's own timing of its plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from stretto.bench.step import min_link_bytes
from stretto.cluster.world import Mesh, World
from stretto.collectives.algorithm_table import AlgorithmTable, parse_table
from stretto.collectives.codecs import parse_wire
from stretto.errors import ConfigError, StrettoError
from stretto.optim import LAMBConfig, LARSConfig
from stretto.planner.plan import Plan
from stretto.planner.presets import add_barrier
from stretto.planner.profile import Profile
from stretto.planner.timing import time_plan
from stretto.program.lowering import ProgramInputs
from stretto.run import RunConfig
from stretto.simulator.algorithm_choice import DEFAULT_PRESET, choose_isolated_table, choose_table
from stretto.simulator.cluster import preset
from stretto.simulator.message_costs import LATENCY, LINK
from stretto.simulator.step_price import StepPrice
from stretto.strategies import AllReduceConfig, AnyStrategyConfig, ShardedConfig
from stretto.strategies.allreduce import AUTO, tune_config
from stretto.strategies.local_updates_config import AveragedConfig
from stretto.strategies.programs import lower
from stretto.strategies.sharded.config import plan_for, unit_bytes, units_of
from stretto.studies.priced_run import CostSource, PricedRun, PriceRequest, StrategyVariant
from stretto.studies.program_prices import ProgramCosts, price_program

MAX_EXACT_RANKS = 64
"""Most ranks for which algorithms are chosen exactly as the run would choose them.

With more ranks, an algorithm is chosen for each all-reduce in isolation: simulating all of a step's
together would take minutes.
"""
_TABLE_SIZES_BYTES = (250_000, 4_000_000)
"""The all-reduce sizes for which algorithms are then chosen."""
_cached = lru_cache(maxsize=16)


def price_by_program(request: PriceRequest) -> StepPrice:
    """Return the price of the step program of a strategy.

    Raises:
        ConfigError: A setting does not fit these ranks, or messages depend on the gradients.
    """
    strategy, choose = _with_algorithm(request)
    inputs = ProgramInputs(
        request.description.model,
        request.cluster.mesh,
        request.description.calls,
        request.reads_gradients,
        choose_table=choose,
    )
    program = lower(strategy, inputs)
    return price_program(program, ProgramCosts(request.timeline, request.cluster, choose))


def _with_algorithm(
    request: PriceRequest,
) -> tuple[AnyStrategyConfig, Callable[[], AlgorithmTable]]:
    """Return the settings with their algorithm chosen, and what chooses that of other averages."""
    strategy, mesh = request.strategy, request.cluster.mesh
    on_gpu = request.run.source.on_gpu
    if isinstance(strategy, AllReduceConfig):
        chosen, table = _resolve_algorithm(strategy, request)
        return chosen, lambda: table
    if not isinstance(strategy, AveragedConfig):
        return strategy, lambda: _default_table(mesh)
    if strategy.algorithm != AUTO or on_gpu:
        table = strategy.table(mesh, on_gpu=on_gpu)
    else:
        table = _default_table(mesh)
    return strategy.model_copy(update={"algorithm": str(table)}), lambda: table


def _resolve_algorithm(
    strategy: AllReduceConfig, request: PriceRequest
) -> tuple[AllReduceConfig, AlgorithmTable]:
    """Return the config with its open settings chosen as the run would, or close to it."""
    mesh, model = request.cluster.mesh, request.description.model
    description = strategy.load_cluster_description()
    unknown = description is None and (request.run.source.on_gpu or mesh.hosts == 1)
    if strategy.algorithm == AUTO and (unknown or mesh.size > MAX_EXACT_RANKS):
        native = parse_wire(strategy.wire).codec is None
        if unknown:
            table = choose_table(None, Mesh((1,)), native=native)
        elif description is None:
            table = _assumed_table(mesh, native)
        else:
            table = choose_isolated_table(
                description.with_mesh(mesh), _TABLE_SIZES_BYTES, native=native
            )
        strategy = strategy.model_copy(update={"algorithm": str(table)})
    chosen = tune_config(strategy, mesh, model)
    return chosen, parse_table(chosen.algorithm)


@_cached
def _default_table(mesh: Mesh) -> AlgorithmTable:
    """Return the default algorithms of local updates on ``mesh``, or close to it."""
    if mesh.size <= MAX_EXACT_RANKS or mesh.hosts == 1:
        return choose_table(None, mesh)
    return _assumed_table(mesh, native=True)


@_cached
def _assumed_table(mesh: Mesh, native: bool) -> AlgorithmTable:
    return choose_isolated_table(
        preset(DEFAULT_PRESET).with_mesh(mesh), _TABLE_SIZES_BYTES, native=native
    )


class PlannedRun(NamedTuple):
    """The plan of a sharded run, with the profile that it is timed by."""

    plan: Plan
    profile: Profile
    whole_layers: bool
    """Whether the optimizer reads whole layers."""
    before_s: float
    """Seconds of the micro-batches before the last one, which send no messages."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients as they travel."""
        return sum(unit.numel for unit in self.plan.units) * self.profile.gradient_bytes


def plan_of(request: PriceRequest) -> PlannedRun:
    """Return the plan of a sharded run under a preset or a plan file.

    Raises:
        ConfigError: The run has only a memory limit; its plan must be made first.
    """
    strategy, config = request.strategy, request.run.config
    assert isinstance(strategy, ShardedConfig)
    if strategy.memory is not None:
        raise ConfigError(
            "strategy.memory: the plan is not made yet; make it with `stretto plan`, which also "
            "predicts the step time, and set strategy.plan to the file that it writes"
        )
    strategy = strategy.model_copy(update={"unit": unit_bytes(strategy)})
    mesh = request.cluster.mesh
    profile = request.run.profile_for(strategy, mesh, request.compute_scale)
    units = units_of(strategy, request.description.model, request.description.calls)
    whole_layers = isinstance(config.optim, LARSConfig | LAMBConfig)
    plan = plan_for(strategy, units, whole_layers=whole_layers, order_is_known=True)
    if request.reads_gradients:
        plan = add_barrier(plan)
    before_s = (config.train.num_micro_batches(mesh.size) - 1) * profile.compute_s
    return PlannedRun(plan, profile, whole_layers, before_s)


def price_sharded(request: PriceRequest) -> StepPrice:
    """Return the simulated step time of a sharded run; raises as `plan_of` does."""
    mesh = request.cluster.mesh
    plan, profile, _, before_s = plan_of(request)
    checkpoints = [unit.checkpoint for unit in plan.units]
    compute_s = before_s + sum(profile.slot_seconds(checkpoints, barrier=plan.barrier))
    seconds = before_s + time_plan(plan, profile).step_s
    num_bytes = min_link_bytes(plan, profile.element_bytes, mesh.hosts)
    bound_s = max(compute_s, num_bytes / request.cluster.between.bytes_per_s)
    latency_s = len(plan.messages) * profile.link.latency_s
    breakdown_s = {LATENCY: latency_s, LINK: profile.link_s(plan) - latency_s}
    return StepPrice(seconds, compute_s, num_bytes, bound_s, breakdown_s)


@dataclass(frozen=True, slots=True)
class StrategyPrice:
    """The price of one strategy on one number of ranks."""

    strategy: str
    """The strategy as it was requested."""
    mesh: Mesh
    price: StepPrice | None
    left_out: str = ""
    """Why there is no price."""


class Predictor:
    """Predicts step times of runs that differ in their strategy and number of ranks."""

    def __init__(self, source: CostSource, world: World, samples: int | None = None) -> None:
        """Create a predictor; ``samples`` per rank replace the run's batch unless None."""
        self._source, self._world, self._samples = source, world, samples
        self._runs: dict[str, PricedRun] = {}

    def price(self, config: RunConfig, mesh: Mesh, compute_scale: float = 1.0) -> StepPrice:
        """Return the price of a step on ``mesh``; ``compute_scale`` multiplies compute times.

        Raises:
            ConfigError: The run is impossible on ``mesh``, or cannot be priced before it runs.
        """
        request = self._request(config, mesh, compute_scale)
        if isinstance(config.strategy, ShardedConfig):
            return price_sharded(request)
        return price_by_program(request)

    def plan(self, config: RunConfig, mesh: Mesh) -> PlannedRun:
        """Return the plan of a sharded run on ``mesh``, and the profile that it is timed by."""
        return plan_of(self._request(config, mesh, 1.0))

    def _request(self, config: RunConfig, mesh: Mesh, compute_scale: float) -> PriceRequest:
        run_config = with_samples_per_rank(config, self._samples, mesh.size)
        # All strategies compute the same, so the computation is described once for all of them.
        key = run_config.model_dump_json(exclude={"strategy"})
        if key not in self._runs:
            self._runs[key] = PricedRun(run_config, self._world, self._source)
        run = self._runs[key]
        cluster = self._source.cluster.with_mesh(mesh)
        description = run.description(mesh, compute_scale)
        return PriceRequest(config.strategy, run, description, cluster, compute_scale)


def with_samples_per_rank(config: RunConfig, samples: int | None, ranks: int) -> RunConfig:
    """Return the run with ``samples`` per rank as its batch; unchanged if None."""
    if samples is None:
        return config
    train = config.train.model_copy(update={"batch": samples * ranks})
    return config.model_copy(update={"train": train})


def price_strategies(
    variants: Sequence[StrategyVariant], meshes: Sequence[Mesh], predictor: Predictor
) -> Iterator[StrategyPrice]:
    """Yield the price of every strategy on every mesh."""
    for mesh in meshes:
        for variant in variants:
            try:
                yield StrategyPrice(variant.spec, mesh, predictor.price(variant.config, mesh))
            except StrettoError as reason:
                yield StrategyPrice(variant.spec, mesh, None, str(reason))

"""Predict the time of a training step for each strategy on each number of ranks.

`Predictor.price` chooses the price function of a strategy from `PRICE_FUNCTIONS`. The functions for
strategies that sum over all ranks and for sharded runs are here; those for gossip are in
`stretto.studies.gossip_prices`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from stretto.bench.step import min_link_bytes
from stretto.cluster.world import Mesh, World
from stretto.collectives.algorithm_table import AlgorithmTable, parse_table
from stretto.collectives.codecs import WIRE_DTYPES, parse_wire
from stretto.comm.buckets import parameters_in_backward_order
from stretto.errors import ConfigError, StrettoError
from stretto.optim import LAMBConfig, LARSConfig
from stretto.planner.presets import add_barrier
from stretto.planner.timing import time_plan
from stretto.run import RunConfig
from stretto.simulator.algorithm_choice import DEFAULT_PRESET, choose_isolated_table, choose_table
from stretto.simulator.cluster import preset
from stretto.simulator.message_costs import LATENCY, LINK
from stretto.simulator.peer_exchanges import pattern_of_topology
from stretto.simulator.step_price import (
    StepPrice,
    price_exchanges_by_all_reduce,
    price_peer_exchanges,
)
from stretto.simulator.step_timeline import Exchange, StepTimeline
from stretto.strategies import (
    ADPSGDConfig,
    AllReduceConfig,
    GossipConfig,
    NoLoCoConfig,
    PostLocalConfig,
    ShardedConfig,
)
from stretto.strategies.allreduce import AUTO, resolve_bucket_lengths, tune_config
from stretto.strategies.local_fragments import cut_fragments, new_flat_buffer
from stretto.strategies.local_updates_config import AveragedConfig, LocalConfig
from stretto.strategies.sharded.config import plan_for, unit_bytes, units_of
from stretto.studies.gossip_prices import price_adpsgd, price_gossip
from stretto.studies.priced_run import CostSource, PricedRun, PriceRequest, StrategyVariant

MAX_EXACT_RANKS = 64
"""Most ranks for which algorithms are chosen exactly as the run would choose them.

With more ranks, an algorithm is chosen for each all-reduce in isolation: simulating all of a step's
together would take minutes.
"""
_TABLE_SIZES_BYTES = (250_000, 4_000_000)
"""The all-reduce sizes for which algorithms are then chosen."""
_cached = lru_cache(maxsize=16)


def price_allreduce(request: PriceRequest) -> StepPrice:
    """Return the price of a step that all-reduces gradient buckets during backward.

    A bucket is sent once its gradients are ready, one bucket after another. Its update waits for
    it, and overlaps with the buckets that follow.

    Raises:
        ConfigError: The size of the messages depends on the gradients (sparse codecs).
    """
    strategy, timeline, model = request.strategy, request.timeline, request.description.model
    assert isinstance(strategy, AllReduceConfig)
    wire = parse_wire(strategy.wire)
    if wire.kept_fraction is not None:
        raise ConfigError(
            f'strategy.wire = "{strategy.wire}": the size of its messages depends on the '
            "gradients, so it has no price before the run"
        )
    chosen, table = _resolve_algorithm(strategy, request)
    named_parameters = parameters_in_backward_order(model)
    total = sum(p.numel() for _, p in named_parameters)
    exchanges: list[Exchange] = []
    ready_s, updated_elements = 0.0, 0
    for count in resolve_bucket_lengths(chosen, model):
        bucket, named_parameters = named_parameters[:count], named_parameters[count:]
        ready_s = max(ready_s, timeline.gradients_ready_s(name for name, _ in bucket))
        updated_s = 0.0 if request.reads_gradients else timeline.update_s * updated_elements / total
        numels = [p.numel() for _, p in bucket]
        dtype = wire.dtype or bucket[0][1].dtype
        flag_bytes = len(bucket) * dtype.itemsize
        payload_bytes = wire.codec.num_bytes(numels) if wire.codec else sum(numels) * dtype.itemsize
        exchanges.append(
            Exchange(payload_bytes + flag_bytes, ready_s, timeline.backward_s + updated_s)
        )
        updated_elements += sum(numels)
    step_timeline = StepTimeline(timeline.step_s, tuple(exchanges), slowdown=timeline.slowdown)
    return price_exchanges_by_all_reduce(step_timeline, table, request.cluster)


def price_local_averaging(request: PriceRequest) -> StepPrice:
    """Return the price of a step, averaged over the steps from one averaging round to the next.

    A round starts after an update. After ``delay`` more steps, ranks wait for its result.
    """
    strategy, mesh = request.strategy, request.cluster.mesh
    assert isinstance(strategy, AveragedConfig)
    step_timeline = _averaging_timeline(request, strategy, WIRE_DTYPES[strategy.wire])
    on_gpu = request.run.source.on_gpu
    if strategy.algorithm != AUTO or on_gpu:
        table = strategy.table(mesh, on_gpu=on_gpu)
    else:
        table = _default_table(mesh)
    return price_exchanges_by_all_reduce(step_timeline, table, request.cluster)


def price_noloco(request: PriceRequest) -> StepPrice:
    """Return the price of a step of NoLoCo, which averages in pairs and waits at once."""
    strategy = request.strategy
    assert isinstance(strategy, NoLoCoConfig)
    pattern = pattern_of_topology(strategy.build_topology(), request.cluster.mesh.size)
    return price_peer_exchanges(
        _averaging_timeline(request, strategy, None), pattern, request.cluster
    )


def _averaging_timeline(
    request: PriceRequest, strategy: LocalConfig, wire: torch.dtype | None
) -> StepTimeline:
    """Return the timeline of a period; for post_local, of a period after its all-reduce phase."""
    timeline, delay = request.timeline, strategy.streaming().delay
    fragments = cut_fragments(request.description.model, strategy.streaming().fragments)
    every = strategy.every
    # Rounds depend on the step number. Start after the all-reduce phase, if there is one.
    before = strategy.from_step if isinstance(strategy, PostLocalConfig) else 0
    first = every * -(-before // every)
    exchanges = []
    for step in range(every):
        fragment_turn = strategy.fragment_turn(first + step)
        issue_s = step * timeline.step_s + timeline.forward_start_s
        for part, named_parameters in fragments:
            if part == fragment_turn:
                num_bytes = new_flat_buffer([p for _, p in named_parameters], wire).nbytes
                due_s = issue_s + delay * timeline.step_s
                exchanges.append(Exchange(num_bytes, issue_s, due_s, number=part))
    return StepTimeline(every * timeline.step_s, tuple(exchanges), every, timeline.slowdown)


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


def price_sharded(request: PriceRequest) -> StepPrice:
    """Return the simulated step time of a sharded run under a preset or a plan file.

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
    # Micro-batches before the last one send no messages.
    num_micro_batches = config.train.num_micro_batches(mesh.size)
    before_s = (num_micro_batches - 1) * profile.compute_s
    checkpoints = [unit.checkpoint for unit in plan.units]
    compute_s = before_s + sum(profile.slot_seconds(checkpoints, barrier=plan.barrier))
    seconds = before_s + time_plan(plan, profile).step_s
    num_bytes = min_link_bytes(plan, profile.element_bytes, mesh.hosts)
    bound_s = max(compute_s, num_bytes / request.cluster.between.bytes_per_s)
    latency_s = len(plan.messages) * profile.link.latency_s
    breakdown_s = {LATENCY: latency_s, LINK: profile.link_s(plan) - latency_s}
    return StepPrice(seconds, compute_s, num_bytes, bound_s, breakdown_s)


PRICE_FUNCTIONS: Sequence[tuple[type, Callable[[PriceRequest], StepPrice]]] = (
    (AllReduceConfig, price_allreduce),
    (GossipConfig, price_gossip),
    (ADPSGDConfig, price_adpsgd),
    (AveragedConfig, price_local_averaging),
    (NoLoCoConfig, price_noloco),
    (ShardedConfig, price_sharded),
)
"""The price function of each strategy config type."""


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
        for config_type, price_function in PRICE_FUNCTIONS:
            if isinstance(config.strategy, config_type):
                return price_function(self._request(config, mesh, compute_scale))
        raise ConfigError(f"strategy.kind = {config.strategy.kind!r} has no price yet")

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

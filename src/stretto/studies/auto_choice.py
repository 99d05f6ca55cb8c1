"""Choose a strategy for ``strategy.kind = "auto"``: the exact one with the least predicted step.

All candidates give every rank the same model and the gradient of the whole batch. Each is priced as
`stretto simulate step` does, and its memory as `stretto plan` does. Nothing is measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stretto.cluster.world import World
from stretto.errors import ConfigError, StrettoError
from stretto.planner.memory import Footprints
from stretto.planner.plan import Plan
from stretto.planner.planner import make_plan
from stretto.planner.profile import load_cluster_or_preset, read_profile
from stretto.planner.unit_choices import PlanConstraints
from stretto.run import RunConfig
from stretto.simulator.algorithm_choice import choose_back_to_back_table, choose_bucket_bytes
from stretto.simulator.cluster import Cluster
from stretto.strategies import AllReduceConfig, AnyStrategyConfig, AutoConfig, ShardedConfig
from stretto.studies.priced_run import CostSource
from stretto.studies.strategy_prices import Predictor
from stretto.units import format_bytes, format_s

_PLANS = ("dear", "zero1", "zero2", "zero3", "ddp")
"""The presets of sharded runs, the one that depends least on the order of units first."""
_SAME = 1.01
"""Predictions this close count as equal: then the candidate that comes first is taken."""


@dataclass(frozen=True, slots=True)
class PricedStrategy:
    """A strategy with its predicted step and memory."""

    name: str
    strategy: AnyStrategyConfig
    seconds: float
    memory: int | None = None
    """Bytes that a rank keeps; None where no limit was given."""


class AutoChoice(NamedTuple):
    """The strategy that was chosen."""

    strategy: AnyStrategyConfig
    reason: str
    """One line: what was chosen, its prediction, and the runner-up."""


def choose_strategy(config: RunConfig, world: World) -> AutoChoice:
    """Return the exact strategy with the least predicted step that fits the memory limit.

    Raises:
        ConfigError: The description is missing or invalid, or nothing fits.
    """
    auto = config.strategy
    assert isinstance(auto, AutoConfig)
    chooser = _Chooser(config, auto, world)
    found = list(chooser.candidates())
    possible = [one for one in found if auto.memory is None or (one.memory or 0) <= auto.memory]
    if not found:
        reasons = "; ".join(f"{name}: {why}" for name, why in chooser.left_out.items())
        raise ConfigError(f'strategy.kind = "auto": no strategy could be priced: {reasons}')
    if not possible:
        needs = f": the least is {format_bytes(min(one.memory or 0 for one in found))}"
        raise ConfigError(
            f"strategy.memory = {format_bytes(auto.memory or 0)}: no exact strategy fits{needs}; "
            "allow more, or take smaller micro-batches"
        )
    fastest_s = min(one.seconds for one in possible)
    best = next(one for one in possible if one.seconds <= _SAME * fastest_s)
    others = sorted((one for one in possible if one is not best), key=lambda one: one.seconds)
    reason = _reason(best, others, auto)
    if chooser.left_out:
        reason += f"; not priced: {', '.join(chooser.left_out)}"
    return AutoChoice(best.strategy, reason)


class _Chooser:
    """Prices the candidates of one run on one cluster."""

    def __init__(self, config: RunConfig, auto: AutoConfig, world: World) -> None:
        self._config, self._auto, self._world = config, auto, world
        name = auto.cluster or ""
        profile = None if auto.profile is None else Path(auto.profile)
        self._unit = None if profile is None else read_profile(profile).unit_bytes
        """The units of a profile: its times are for these only."""
        self.left_out: dict[str, str] = {}
        """Why strategies could not be priced."""
        self._cluster = load_cluster_or_preset(name)
        source = CostSource(self._cluster, name, profile, auto.device)
        self._predictor = Predictor(source, world)
        self._compute_s = 0.0
        """Seconds of computation of a step, with the update of the whole model."""

    def candidates(self) -> Iterator[PricedStrategy]:
        """Yield the candidates that can be priced, the simplest first."""
        strategies: list[tuple[str, AnyStrategyConfig]] = [("allreduce", self._all_reduce())]
        strategies += [(plan, self._preset(plan)) for plan in _PLANS]
        for name, strategy in strategies:
            try:
                yield self._candidate(name, strategy)
            except StrettoError as reason:
                self.left_out[name] = str(reason)
        if self._auto.memory is not None and self._world.size > 1:
            yield from self._planned(self._auto.memory)

    def _candidate(self, name: str, strategy: AnyStrategyConfig) -> PricedStrategy:
        config = self._config.model_copy(update={"strategy": strategy})
        price = self._predictor.price(config, self._world.mesh)
        memory = None if self._auto.memory is None else self._memory_of(strategy)
        seconds = price.seconds
        if isinstance(strategy, ShardedConfig):
            plan = self._predictor.plan(config, self._world.mesh).plan
            seconds += self._update_s(plan, price.compute_s)
        else:
            self._compute_s = price.compute_s
        return PricedStrategy(name, strategy, seconds, memory)

    def _update_s(self, plan: Plan, compute_s: float) -> float:
        """Return the seconds of the update that the timing of ``plan`` leaves out.

        Without a barrier a plan's updates are made beside computation, on a thread of their own.
        Here they count, because ranks seldom have a core to spare. A rank updates all of a unit
        that is not sharded, and its own part of the others.
        """
        whole = sum(unit.numel for unit in plan.units)
        updated = sum(
            unit.numel / (self._world.size if unit.sharding.shards_optimizer else 1)
            for unit in plan.units
        )
        return max(0.0, self._compute_s - compute_s) * updated / whole

    def _memory_of(self, strategy: AnyStrategyConfig) -> int:
        """Return the bytes of a rank: those of the plan; allreduce also keeps its buckets."""
        sharded = strategy if isinstance(strategy, ShardedConfig) else self._preset("ddp")
        config = self._config.model_copy(update={"strategy": sharded})
        planned = self._predictor.plan(config, self._world.mesh)
        peak = Footprints(planned.profile).peak(planned.plan)
        return peak if sharded is strategy else peak + planned.gradient_bytes

    def _planned(self, memory: int) -> Iterator[PricedStrategy]:
        """Yield the plan that the planner makes for the limit, if there is one."""
        auto = self._auto
        strategy = ShardedConfig(memory=memory, cluster=auto.cluster, device=auto.device)
        if auto.profile is not None:
            strategy = ShardedConfig(memory=memory, profile=auto.profile)
        preset = self._config.model_copy(update={"strategy": self._preset("zero2")})
        planned = self._predictor.plan(preset, self._world.mesh)
        allowed = PlanConstraints(barrier=planned.plan.barrier, whole_layers=planned.whole_layers)
        try:
            result = make_plan(planned.profile, memory, allowed)
        except ConfigError as reason:  # the limit is too small for any plan
            self.left_out["a plan"] = str(reason)
            return
        checkpoints = [unit.checkpoint for unit in result.plan.units]
        slots_s = planned.profile.slot_seconds(checkpoints, barrier=result.plan.barrier)
        compute_s = planned.before_s + sum(slots_s)
        seconds = planned.before_s + result.step_s + self._update_s(result.plan, compute_s)
        yield PricedStrategy("a plan", strategy, seconds, result.peak_bytes)

    def _preset(self, plan: str) -> ShardedConfig:
        return ShardedConfig(plan=plan, unit=self._unit)

    def _all_reduce(self) -> AllReduceConfig:
        """Return all-reduce with the algorithm and buckets for the described cluster."""
        cluster: Cluster = self._cluster.with_mesh(self._world.mesh)
        table = choose_back_to_back_table(self._cluster, self._world.mesh)
        chosen = AllReduceConfig(algorithm=str(table))
        if self._world.size == 1:
            return chosen
        return chosen.model_copy(update={"bucket_bytes": choose_bucket_bytes(cluster, table)})


def _reason(best: PricedStrategy, others: list[PricedStrategy], auto: AutoConfig) -> str:
    memory = ""
    if best.memory is not None and auto.memory is not None:
        memory = f", {format_bytes(best.memory)} of {format_bytes(auto.memory)} a rank"
    text = (
        f"auto takes {best.name}: a step of {format_s(best.seconds)} is predicted on "
        f"{auto.cluster}{memory}"
    )
    rest = [f"{one.name} {format_s(one.seconds)}" for one in others]
    return f"{text}; next: {', '.join(rest)}" if rest else text

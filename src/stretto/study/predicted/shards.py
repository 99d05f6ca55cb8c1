"""Prices of sharded runs: what their plan's own clock says."""

from stretto.errors import ConfigError
from stretto.measure.carried import link_bytes
from stretto.optim import LAMBConfig, LARSConfig
from stretto.plan.building import with_barrier
from stretto.plan.timing import time_plan
from stretto.sim.charge import LATENCY, LINK
from stretto.sim.steps import StepPrice
from stretto.strategy import ShardedConfig
from stretto.strategy.sharded.config import plan_for, unit_bytes, units_of
from stretto.study.predicted.setting import Setting


def price_sharded(setting: Setting) -> StepPrice:
    """Return the price of a step by a preset, or by a plan that is there.

    Raises:
        ConfigError: The plan is still to be made, for a memory limit.
    """
    strategy, config = setting.strategy, setting.subject.config
    assert isinstance(strategy, ShardedConfig)
    if strategy.memory is not None:
        raise ConfigError(
            "strategy.memory: the plan is still to be made; `stretto plan` makes it and says what "
            "a step takes, and strategy.plan takes the file that it writes"
        )
    strategy = strategy.model_copy(update={"unit": unit_bytes(strategy)})
    mesh = setting.cluster.mesh
    profile = setting.subject.profile_for(strategy, mesh, setting.longer)
    units = units_of(strategy, setting.known.model, setting.known.calls)
    whole_layers = isinstance(config.optim, LARSConfig | LAMBConfig)
    plan = plan_for(strategy, units, whole_layers=whole_layers, seen=True)
    if setting.reads_gradients:
        plan = with_barrier(plan)
    # Micro-batches before the last one are computed without a message.
    pieces = config.train.pieces(mesh.size)
    before_s = (pieces - 1) * profile.compute_s
    checkpoints = [unit.checkpoint for unit in plan.units]
    compute_s = before_s + sum(profile.lengths(checkpoints, barrier=plan.barrier))
    seconds = before_s + time_plan(plan, profile).step_s
    num_bytes = link_bytes(plan, profile.widths, mesh.hosts)
    bound_s = max(compute_s, num_bytes / setting.cluster.between.bytes_per_s)
    latency_s = len(plan.messages) * profile.link.latency_s
    spent_s = {LATENCY: latency_s, LINK: profile.channel_s(plan) - latency_s}
    return StepPrice(seconds, compute_s, num_bytes, bound_s, spent_s)

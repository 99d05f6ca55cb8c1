"""How the ranks stay one model, chosen by one word."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import nn

from stretto.cluster.world import Mesh
from stretto.comm.channel import Channel
from stretto.plan.profile import Profile
from stretto.strategy.adpsgd.config import ADPSGDConfig
from stretto.strategy.adpsgd.strategy import ADPSGD
from stretto.strategy.allreduce import AllReduce, AllReduceConfig, bucket_cuts, tuned
from stretto.strategy.base import Agreed, MakeOptimizer, Strategy
from stretto.strategy.gossip.config import (
    AnyGossipConfig,
    CrossoverConfig,
    DPSGDConfig,
    GossipConfig,
    SGPConfig,
)
from stretto.strategy.gossip.group import HOSTS, num_groups
from stretto.strategy.gossip.segments import cut_segments
from stretto.strategy.gossip.strategy import Gossip
from stretto.strategy.local.config import (
    AnyLocalConfig,
    DiLoCoConfig,
    LocalConfig,
    LocalSGDConfig,
    NoLoCoConfig,
    PostLocalConfig,
    SlowMoConfig,
)
from stretto.strategy.local.fragment import cut_fragments
from stretto.strategy.local.strategy import LocalUpdates
from stretto.strategy.sharded.config import ShardedConfig, checked_plan
from stretto.strategy.sharded.known import Known
from stretto.strategy.sharded.strategy import Sharded
from stretto.telemetry.timeline import Recorder

AnyStrategyConfig = (
    AllReduceConfig | ShardedConfig | AnyGossipConfig | ADPSGDConfig | AnyLocalConfig
)
StrategyConfig = Annotated[AnyStrategyConfig, Field(discriminator="kind")]
"""The configs of all strategies, tagged by ``kind``."""

STRATEGIES: dict[str, type[AnyStrategyConfig]] = {
    "allreduce": AllReduceConfig,
    "sharded": ShardedConfig,
    "crossover": CrossoverConfig,
    "dpsgd": DPSGDConfig,
    "sgp": SGPConfig,
    "adpsgd": ADPSGDConfig,
    "local_sgd": LocalSGDConfig,
    "post_local": PostLocalConfig,
    "slowmo": SlowMoConfig,
    "diloco": DiLoCoConfig,
    "noloco": NoLoCoConfig,
}
"""The words a user may choose from."""


def build_strategy(
    config: AnyStrategyConfig,
    channel: Channel,
    recorder: Recorder | None = None,
    *,
    weigh_samples: bool = False,
    calls: Sequence[str] | None = None,
    profile: Profile | None = None,
) -> Strategy:
    """Return the strategy that ``config`` names, talking over ``channel``.

    ``weigh_samples`` is for a loop whose loss is a mean over the local batch; ``calls`` are the
    modules that a forward calls, in order, where somebody has seen one; ``profile`` is what the
    model takes, where somebody has estimated it.
    """
    if isinstance(config, ShardedConfig):
        sharded = Sharded(config, channel, recorder, weigh_samples=weigh_samples)
        sharded.known = Known(calls, profile)
        return sharded
    if isinstance(config, GossipConfig):
        return Gossip(config, channel, recorder, own_means=weigh_samples, calls=calls)
    if isinstance(config, ADPSGDConfig):
        return ADPSGD(config, channel, recorder, own_means=weigh_samples)
    if isinstance(config, LocalConfig):
        return LocalUpdates(config, channel, recorder, own_means=weigh_samples)
    return AllReduce(config, channel, recorder, weigh_samples=weigh_samples)


def check_strategy(config: AnyStrategyConfig, model: nn.Module, calls: Sequence[str]) -> None:
    """Find mistakes before anything starts.

    Raises:
        ConfigError: A file that is named is missing or wrong, or does not fit the model.
    """
    if isinstance(config, ShardedConfig):
        checked_plan(config, model, calls)
    elif isinstance(config, GossipConfig):
        cut_segments(model, config.segments)
    elif isinstance(config, LocalConfig):
        cut_fragments(model, config.streaming().fragments)
    elif isinstance(config, AllReduceConfig):
        config.description()
        bucket_cuts(config, model)


def remarks(config: AnyStrategyConfig) -> list[str]:
    """Return what people should know of ``config`` before the first step."""
    return config.remarks() if isinstance(config, GossipConfig) else []


def chosen_settings(config: AnyStrategyConfig, mesh: Mesh, model: nn.Module) -> dict[str, object]:
    """Return what ``config`` leaves open and a run on ``mesh`` chooses, by key."""
    if isinstance(config, GossipConfig) and config.groups == HOSTS:
        return {"groups": num_groups(config.groups, mesh)}
    if not isinstance(config, AllReduceConfig):
        return {}
    chosen = tuned(config, mesh, model)
    derived: dict[str, object] = {
        key: getattr(chosen, key)
        for key in ("algorithm", "fusion")
        if getattr(chosen, key) != getattr(config, key)
    }
    if chosen.cuts is None:
        derived["cuts"] = bucket_cuts(chosen, model)
    return derived


__all__ = [
    "ADPSGD",
    "STRATEGIES",
    "ADPSGDConfig",
    "Agreed",
    "AllReduce",
    "AllReduceConfig",
    "AnyStrategyConfig",
    "CrossoverConfig",
    "DPSGDConfig",
    "DiLoCoConfig",
    "Gossip",
    "GossipConfig",
    "LocalConfig",
    "LocalSGDConfig",
    "LocalUpdates",
    "MakeOptimizer",
    "NoLoCoConfig",
    "PostLocalConfig",
    "SGPConfig",
    "Sharded",
    "ShardedConfig",
    "SlowMoConfig",
    "Strategy",
    "StrategyConfig",
    "build_strategy",
    "check_strategy",
    "chosen_settings",
    "remarks",
]

"""Strategies: how ranks exchange gradients or parameters, and the registry that builds them."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import nn

from stretto.cluster.world import Mesh
from stretto.comm.transport import Transport
from stretto.errors import ConfigError
from stretto.planner.profile import Profile
from stretto.program.blocks import cut_fragments, cut_segments
from stretto.strategies.adpsgd import ADPSGD, ADPSGDConfig
from stretto.strategies.allreduce import (
    AllReduce,
    AllReduceConfig,
    resolve_bucket_lengths,
    tune_config,
)
from stretto.strategies.auto import AutoConfig
from stretto.strategies.contract import MakeOptimizer, StepGradients, Strategy
from stretto.strategies.gossip.config import (
    AnyGossipConfig,
    CrossoverConfig,
    DPSGDConfig,
    GossipConfig,
    SGPConfig,
)
from stretto.strategies.gossip.gossip import Gossip
from stretto.strategies.gossip.groups import HOSTS, num_groups
from stretto.strategies.local_updates import LocalUpdates
from stretto.strategies.local_updates_config import (
    AnyLocalConfig,
    DiLoCoConfig,
    LocalConfig,
    LocalSGDConfig,
    NoLoCoConfig,
    PostLocalConfig,
    SlowMoConfig,
)
from stretto.strategies.sharded.assembly import ModelInfo
from stretto.strategies.sharded.config import ShardedConfig, checked_plan
from stretto.strategies.sharded.sharded import Sharded
from stretto.telemetry.timeline import Recorder

AnyStrategyConfig = (
    AllReduceConfig | ShardedConfig | AnyGossipConfig | ADPSGDConfig | AnyLocalConfig | AutoConfig
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
"""Config class of each strategy, by the name that a user types as ``strategy.kind``.

"auto" is not one of them: it is replaced by one before a run."""


def build_strategy(
    config: AnyStrategyConfig,
    transport: Transport,
    recorder: Recorder | None = None,
    *,
    weigh_samples: bool = False,
    calls: Sequence[str] | None = None,
    profile: Profile | None = None,
) -> Strategy:
    """Return the strategy that ``config`` describes.

    Args:
        config: The strategy's settings; its type selects the class.
        transport: Sends all messages of the strategy.
        recorder: Receives the strategy's timeline spans.
        weigh_samples: The loss is a mean over the local batch, so gradients are weighted by the
            number of local samples.
        calls: Names of the modules that a forward calls, in order, if a forward was traced.
        profile: Time and memory that the model takes, if they were estimated.
    """
    if isinstance(config, ShardedConfig):
        sharded = Sharded(config, transport, recorder, weigh_samples=weigh_samples)
        sharded.model_info = ModelInfo(calls, profile)
        return sharded
    if isinstance(config, GossipConfig):
        return Gossip(config, transport, recorder, loss_is_rank_mean=weigh_samples, calls=calls)
    if isinstance(config, ADPSGDConfig):
        return ADPSGD(config, transport, recorder, loss_is_rank_mean=weigh_samples)
    if isinstance(config, LocalConfig):
        return LocalUpdates(config, transport, recorder, loss_is_rank_mean=weigh_samples)
    if isinstance(config, AllReduceConfig):
        return AllReduce(config, transport, recorder, weigh_samples=weigh_samples)
    if isinstance(config, AutoConfig):
        raise ConfigError(
            'strategy.kind = "auto": only stretto train chooses a strategy; name one here, such as '
            "the fastest that `stretto simulate step` predicts"
        )
    raise _unknown(config)


def check_strategy(config: AnyStrategyConfig, model: nn.Module, calls: Sequence[str]) -> None:
    """Check that ``config`` fits ``model``, before any process group or thread exists.

    Raises:
        ConfigError: A file that the config names is missing, invalid, or for another model.
    """
    if isinstance(config, ShardedConfig):
        checked_plan(config, model, calls)
    elif isinstance(config, GossipConfig):
        cut_segments(model, config.segments)
    elif isinstance(config, LocalConfig):
        cut_fragments(model, config.streaming().fragments)
    elif isinstance(config, AllReduceConfig):
        config.load_cluster_description()
        resolve_bucket_lengths(config, model)
    elif not isinstance(config, ADPSGDConfig | AutoConfig):
        raise _unknown(config)


def _unknown(config: object) -> TypeError:
    """Return the error for a config that none of the strategies is made from."""
    return TypeError(
        f"{type(config).__name__} is not the config of a strategy: expected one of "
        f"{', '.join(kind.__name__ for kind in STRATEGIES.values())}"
    )


def warnings(config: AnyStrategyConfig) -> list[str]:
    """Return warnings about ``config`` that the user should read before the first step."""
    return config.warnings() if isinstance(config, GossipConfig) else []


def chosen_settings(config: AnyStrategyConfig, mesh: Mesh, model: nn.Module) -> dict[str, object]:
    """Return, by key, the settings that ``config`` leaves open and a run on ``mesh`` chooses."""
    if isinstance(config, GossipConfig) and config.groups == HOSTS:
        return {"groups": num_groups(config.groups, mesh)}
    if not isinstance(config, AllReduceConfig):
        return {}
    chosen = tune_config(config, mesh, model)
    derived: dict[str, object] = {
        key: getattr(chosen, key)
        for key in ("algorithm", "bucket_bytes")
        if getattr(chosen, key) != getattr(config, key)
    }
    if chosen.bucket_lengths is None:
        derived["bucket_lengths"] = resolve_bucket_lengths(chosen, model)
    return derived


__all__ = [
    "ADPSGD",
    "STRATEGIES",
    "ADPSGDConfig",
    "AllReduce",
    "AllReduceConfig",
    "AnyStrategyConfig",
    "AutoConfig",
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
    "StepGradients",
    "Strategy",
    "StrategyConfig",
    "build_strategy",
    "check_strategy",
    "chosen_settings",
    "warnings",
]

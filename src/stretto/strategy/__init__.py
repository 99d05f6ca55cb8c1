"""How the ranks stay one model, chosen by one word."""

from stretto.comm.channel import Channel
from stretto.strategy.allreduce import AllReduce, AllReduceConfig, bucket_cuts, tuned
from stretto.strategy.base import Agreed, MakeOptimizer, Strategy
from stretto.telemetry.timeline import Recorder

StrategyConfig = AllReduceConfig
"""The configs of all strategies, tagged by ``kind``; a union once there is a second."""

STRATEGIES = {"allreduce": AllReduceConfig}
"""The words a user may choose from."""


def build_strategy(
    config: StrategyConfig,
    channel: Channel,
    recorder: Recorder | None = None,
    *,
    weigh_samples: bool = False,
) -> Strategy:
    """Return the strategy that ``config`` names, talking over ``channel``.

    ``weigh_samples`` is for a loop whose loss is a mean over the local batch.
    """
    return AllReduce(config, channel, recorder, weigh_samples=weigh_samples)


__all__ = [
    "STRATEGIES",
    "Agreed",
    "AllReduce",
    "AllReduceConfig",
    "MakeOptimizer",
    "Strategy",
    "StrategyConfig",
    "bucket_cuts",
    "build_strategy",
    "tuned",
]

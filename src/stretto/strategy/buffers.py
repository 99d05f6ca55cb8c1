"""Buffers of a model, which are each rank's own while it trains: batch statistics, counts."""

from torch import nn

from stretto.comm.channel import Channel
from stretto.comm.spread import average_, spread_from_rank_0_


class Buffers:
    """What `settle` makes equal: the mean of statistics; what cannot be averaged is rank 0's."""

    def __init__(self, model: nn.Module) -> None:
        self._statistics = [b for b in model.buffers() if b.is_floating_point()]
        self._counters = [b for b in model.buffers() if not b.is_floating_point()]

    def settle(self, channel: Channel) -> None:
        """Make them equal; all ranks together."""
        average_(self._statistics, channel)
        spread_from_rank_0_(self._counters, channel)

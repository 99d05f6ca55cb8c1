"""Run a `Schedule` on a tensor over a `Channel`, once; who runs it often keeps a `Courier`."""

import torch
from torch import Tensor

from stretto.comm.channel import Channel
from stretto.comm.courier import Courier
from stretto.comm.schedule import Schedule


@torch.no_grad()
def execute(schedule: Schedule, tensor: Tensor, channel: Channel) -> None:
    """Apply ``schedule`` to the contiguous ``tensor`` in place; every rank calls this together."""
    with Courier(channel) as courier:
        courier.run(courier.prepare(schedule, tensor))

"""Weights for a user's own loop, whose loss is a mean over a local batch of any size."""

import torch
from torch import Tensor, nn

from stretto.comm.algorithms import ALLREDUCE
from stretto.comm.channel import Channel, Pending
from stretto.comm.courier import Courier, Doorstep, Ticket
from stretto.comm.execute import start


class SampleWeights:
    """Each rank weighs n_i / sum n: the counts are seen in forward and summed beside backward."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = 0
        self._count = torch.zeros(1, dtype=torch.float64)
        self._ticket: Ticket | None = None
        model.register_forward_pre_hook(self._look)

    def start(self, courier: Courier | Doorstep, channel: Channel) -> None:
        """Sum the counts of this step; the buckets follow in the same queue."""

        def send() -> Pending:
            self._count.fill_(self._seen)
            return start(ALLREDUCE["native"](channel.size), self._count, channel)

        self._ticket = courier.submit(send)

    def mine(self) -> float:
        """Return the samples this rank has put through the model in this step."""
        return float(self._seen)

    def total(self) -> float:
        """Return the samples of all ranks; the next forward counts anew."""
        if self._ticket is not None:  # None where the model has nothing to train
            self._ticket.wait()
        self._seen = 0
        return max(1.0, float(self._count))

    def _look(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        first = next((x for x in inputs if isinstance(x, Tensor) and x.ndim), None)
        if module.training and torch.is_grad_enabled():
            self._seen += 1 if first is None else first.shape[0]

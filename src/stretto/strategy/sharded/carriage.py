"""The messages of a plan on real tensors: an errand for each block's reduction and gather."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.comm.algorithms import (
    ALL_GATHER,
    ALLREDUCE,
    HOST_ALL_GATHER,
    HOST_REDUCE_SCATTER,
    REDUCE_SCATTER,
    doubling,
)
from stretto.comm.algorithms.table import parse_word
from stretto.comm.channel import Channel, Finished, Pending, SharesNatively
from stretto.comm.courier import Courier
from stretto.comm.errand import Errand
from stretto.comm.schedule import Schedule, on_lane
from stretto.comm.small import add_up_, gather_text
from stretto.strategy.sharded.config import AUTO
from stretto.strategy.sharded.storage import UnitStorage

LANES = 3
"""Blocks that travel beside each other, whole: while one waits for a rank that is late, the bytes
of another keep the link busy."""
COMMUNICATORS = 2
"""The same on a GPU, where each has connections and threads of its own."""
_SPLIT = 1_500_000
"""From so many bytes on, a block is worth sending in two parts, where phases follow each other."""


class Carriage:
    """Errands laid out once, run in every step; on a GPU, its back end's own messages."""

    def __init__(
        self, courier: Courier, channel: Channel, units: Sequence[UnitStorage], algorithm: str
    ) -> None:
        self._courier, self._channel, self._mesh = courier, channel, channel.mesh
        self._algorithm = algorithm
        self._units = units
        on_gpu = units[0].flat.is_cuda and isinstance(channel, SharesNatively)
        self._natively = [on_gpu and algorithm == AUTO and not unit.in_host for unit in units]
        if any(self._natively):
            channel.reserve(COMMUNICATORS)
        self._errands = self._lay_out()

    def _lay_out(self) -> dict[tuple[int, int], tuple[Errand, Errand]]:
        jobs: list[tuple[Schedule, Tensor]] = []
        places: list[tuple[int, int]] = []
        for index, unit in enumerate(self._units):
            if self._natively[index]:
                continue
            for block, gradient in enumerate(unit.gradients):
                lane = len(places) % LANES
                places.append((index, block))
                whole = unit.whole(block)
                jobs.append((self._in_turn(self._reducing(unit, gradient), lane), gradient))
                jobs.append((self._in_turn(self._gathering(unit, whole), lane), whole))
        if not jobs:
            return {}
        schedules, tensors = zip(*jobs, strict=True)
        errands = iter(self._courier.prepare_all(schedules, tensors))
        return {place: (next(errands), next(errands)) for place in places}

    def reduce(self, unit: int, block: int) -> Pending:
        """Begin to sum a block's gradients."""
        if not self._natively[unit]:
            return self._courier.start(self._errands[unit, block][0])
        storage = self._units[unit]
        gradient = storage.gradients[block]
        if not gradient.numel():
            return Finished(time.monotonic())
        if not storage.sharding.is_split:
            return self._channel.start_all_reduce(gradient)
        assert isinstance(self._channel, SharesNatively)
        return self._channel.start_reduce_scatter(gradient, self.lane(unit, block))

    def gather(self, unit: int, block: int) -> Pending:
        """Begin to make a block's parameters whole."""
        if not self._natively[unit]:
            return self._courier.start(self._errands[unit, block][1])
        whole = self._units[unit].whole(block)
        if not whole.numel():
            return Finished(time.monotonic())
        assert isinstance(self._channel, SharesNatively)
        return self._channel.start_all_gather(whole, self.lane(unit, block))

    def lane(self, unit: int, block: int) -> int:
        """Return which of a GPU's messages beside each other a block's is."""
        native = self._natively[unit] and self._units[unit].sharding.is_split
        return (unit + block) % COMMUNICATORS if native else 0

    def small_sum(self, numel: int) -> Callable[[Tensor], None]:
        """Return what overwrites a small float64 tensor with its sum; all ranks together.

        It is called beside the messages, and beside whatever the training loop sums meanwhile: so
        it has a lane of its own, behind those of the messages. A GPU queues all of them in order.
        """
        if self._units[0].flat.is_cuda:
            return lambda tensor: add_up_(tensor, self._channel)
        room = torch.zeros(numel, dtype=torch.float64)
        errands = (errand for pair in self._errands.values() for errand in pair)
        mine = max((lane for errand in errands for lane in errand.lanes), default=0)
        lane = 1 + max(int(theirs) for theirs in gather_text(str(mine), self._channel))
        (errand,) = self._courier.prepare_all([on_lane(doubling(self._mesh.size), lane)], [room])

        def add_up(tensor: Tensor) -> None:
            room.copy_(tensor.view(-1))
            self._courier.start(errand).wait()
            tensor.view(-1).copy_(room)

        return add_up

    def _reducing(self, unit: UnitStorage, tensor: Tensor) -> Schedule:
        name, parts = self._choice(tensor)
        if unit.in_host:
            return HOST_REDUCE_SCATTER["ring"](self._mesh, parts)
        if unit.sharding.is_split:
            return REDUCE_SCATTER[name](self._mesh, parts)
        return ALLREDUCE["hierarchical" if name == "hierarchical" else "ring"](self._mesh, parts)

    def _gathering(self, unit: UnitStorage, tensor: Tensor) -> Schedule:
        name, parts = self._choice(tensor)
        if unit.in_host:
            return HOST_ALL_GATHER["ring"](self._mesh, parts)
        return ALL_GATHER[name](self._mesh, parts)

    def _choice(self, tensor: Tensor) -> tuple[str, int]:
        if self._algorithm != AUTO:
            return parse_word(self._algorithm, REDUCE_SCATTER)
        if not self._is_nested:
            return "ring", 1
        return "hierarchical", 2 if tensor.nbytes >= _SPLIT else 1

    @property
    def _is_nested(self) -> bool:
        even = len(set(self._mesh.ranks_per_host)) == 1
        return even and self._mesh.hosts > 1 and self._mesh.ranks_per_host[0] > 1

    def _in_turn(self, schedule: Schedule, lane: int) -> Schedule:
        """Give a block that is sent in one phase, whole, a lane among its neighbours."""
        return schedule if self._is_nested or self._algorithm != AUTO else on_lane(schedule, lane)

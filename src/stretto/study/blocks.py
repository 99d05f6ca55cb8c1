"""Blocks of one size on a carriage of their own: the messages of a run, without a run."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from stretto.cluster.world import Mesh
from stretto.comm.channel import Channel, Pending
from stretto.comm.courier import Courier
from stretto.comm.shards import ALIGN, lay_unit
from stretto.comm.small import meet_all
from stretto.measure.interleave import largest
from stretto.measure.slowdown import Traffic
from stretto.plan.value import Sharding, Unit
from stretto.strategy.sharded.carriage import Carriage
from stretto.strategy.sharded.config import AUTO
from stretto.strategy.sharded.ledger import Ledger
from stretto.strategy.sharded.storage import Types, UnitStorage
from stretto.train.estimated import lanes_in

_SHARES = 5
"""Times that one lane is timed against all."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What blocks are like."""

    types: Types
    device: str = "cpu"
    algorithm: str = AUTO
    in_host: bool = False
    """Whether they are shared out in each host; then gathers alone are of interest."""


def lanes_of(mesh: Mesh, kind: Kind) -> int:
    """Return how many blocks travel beside each other in a run; in a host, one."""
    return 1 if kind.in_host else lanes_in(mesh, kind.device, kind.algorithm)


class Blocks:
    """As many blocks as there are lanes; all ranks do everything together. `close` ends threads."""

    def __init__(self, channel: Channel, kind: Kind, num_bytes: int) -> None:
        self._channel, self._kind = channel, kind
        self._count = lanes_of(channel.mesh, kind)
        numel = max(1, num_bytes // kind.types.compute.itemsize)
        units = [_storage(channel, kind, numel) for _ in range(self._count)]
        self._courier = Courier(channel, frugal=True)
        self._carriage = Carriage(self._courier, channel, units, kind.algorithm)
        self._begun: list[Pending] = []
        self._turn = 0

    def seconds(self) -> float:
        """Return what a reduction or a gather takes, on average, where all lanes are busy.

        Lanes share the link: so a block's seconds are those of all, divided by their number.
        """
        kinds = [self._carriage.gather]
        if not self._kind.in_host:
            kinds.append(self._carriage.reduce)
        meet_all(self._channel)
        start_s = time.perf_counter()
        for begin in kinds:
            self._carry(begin)
        took_s = largest(time.perf_counter() - start_s, self._channel)
        return took_s / (len(kinds) * self._count)

    def lane_share(self) -> float:
        """Return what of the rate a gather reaches that has the link to itself."""
        if self._count == 1:
            return 1.0
        shares = []
        for _ in range(_SHARES):
            meet_all(self._channel)
            all_s = self._timed_s(range(self._count)) / self._count
            meet_all(self._channel)
            shares.append(all_s / self._timed_s(range(1)))
        return min(1.0, statistics.median(shares))

    def _timed_s(self, units: range) -> float:
        start_s = time.perf_counter()
        self._begun = [self._carriage.gather(unit, 0) for unit in units]
        self.wait()
        if self._kind.device == "cuda":
            torch.cuda.synchronize()
        return largest(time.perf_counter() - start_s, self._channel)

    def _carry(self, begin: Callable[[int, int], Pending]) -> None:
        self._begun = [begin(unit, 0) for unit in range(self._count)]
        self.wait()
        if self._kind.device == "cuda":
            torch.cuda.synchronize()

    @property
    def traffic(self) -> Traffic:
        """Reductions and gathers in turn, for those who want the link busy."""
        return Traffic(self.start, self.wait)

    def start(self) -> None:
        """Begin the next one; what is under way on the same lane goes before it."""
        unit, gathers = self._turn % self._count, self._turn // self._count % 2
        begin = self._carriage.gather if gathers else self._carriage.reduce
        self._begun.append(begin(unit, 0))
        self._turn += 1

    def wait(self) -> None:
        """Wait for all that were begun."""
        for pending in self._begun:
            pending.wait()
        self._begun = []

    def close(self) -> None:
        """End the threads of the lanes."""
        self._courier.close()


def _storage(channel: Channel, kind: Kind, numel: int) -> UnitStorage:
    mesh, rank, ranks, grain = channel.mesh, channel.rank, channel.size, ALIGN
    if kind.in_host:
        ranks = mesh.ranks_per_host[0]
        rank, grain = rank % ranks, ALIGN * mesh.hosts
    planned = Unit(
        name="block", numel=numel, sharding=Sharding.ZERO2, blocks=(numel,), in_host=kind.in_host
    )
    parameter = nn.Parameter(torch.zeros(numel, dtype=kind.types.kept, device=kind.device))
    layout = lay_unit([numel], [numel], ranks, grain)
    return UnitStorage([parameter], layout, planned, rank, kind.types, Ledger(1))

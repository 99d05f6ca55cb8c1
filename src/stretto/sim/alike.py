"""Which ranks do the same at the same times: one of them is followed and stands for the others."""

import math
from dataclasses import dataclass

import numpy as np

from stretto.cluster.world import Mesh
from stretto.comm.schedule import Schedule
from stretto.sim.tasks import Ints


@dataclass(frozen=True, slots=True)
class Alike:
    """Two ways of moving ranks that change nothing: all of them on, or each inside its block."""

    size: int
    period: int
    """Ranks that are so far apart are alike; ``size`` where none are."""
    block: int = 1
    stride: int = 1
    """Places of a block that are so far apart are alike."""

    @property
    def ranks(self) -> Ints:
        """Return those that stand for all."""
        every = np.arange(self.period, dtype=np.int64)
        return every[every % self.block < self.stride]

    @property
    def num_ranks(self) -> int:
        """Return how many these are."""
        return self.period // self.block * self.stride

    @property
    def copies(self) -> int:
        """Return how many ranks each of them stands for."""
        return self.size // self.num_ranks

    def on_host(self, ranks: int) -> int:
        """Return how many ranks of its own host, of so many, each of them stands for."""
        return self.block // self.stride if ranks % self.block == 0 else 1

    def stand_in(self, rank: Ints) -> Ints:
        """Return who of `ranks`, by place there, stands for each of ``rank``."""
        block, place = _divided(rank % self.period, self.block)
        return block * self.stride + place % self.stride

    def way(self, source: Ints, target: Ints) -> Ints:
        """Return the way from one rank to another, the same for all pairs that are alike."""
        if self.block == 1:
            return (target - source) % self.size
        block, place = _divided(source, self.block)
        other, there = _divided(target, self.block)
        blocks = (other - block) % (self.size // self.block)
        return blocks * self.block + (there - place) % self.block

    def target(self, source: Ints, way: Ints) -> Ints:
        """Return the rank to which ``way`` leads from ``source``."""
        if self.block == 1:
            return (source + way) % self.size
        block, place = _divided(source, self.block)
        blocks, places = _divided(way, self.block)
        there = (block + blocks) % (self.size // self.block)
        return there * self.block + (place + places) % self.block


def _divided(rank: Ints, block: int) -> tuple[Ints, Ints]:
    """Return the block of each rank and its place in it."""
    return rank // block, rank % block


def all_different(schedule: Schedule) -> Alike:
    """Every rank stands for itself."""
    return Alike(schedule.size, schedule.size)


def by_program(schedule: Schedule) -> Alike:
    """Ranks are alike that do the same, wherever they are."""
    n = schedule.size
    period = n if schedule.period is None else math.gcd(schedule.period, n)
    return Alike(n, period, block=schedule.turn or 1)


def on_hosts(schedule: Schedule, mesh: Mesh, *, turned: bool = True) -> Alike:
    """Ranks are alike that also share their host's link and cores with others like theirs.

    Blocks may be turned where a host is made of whole blocks, or a block of whole hosts: then
    hosts are moved onto hosts. Where hosts differ in ranks, all are different.
    """
    n, each = schedule.size, set(mesh.ranks_per_host)
    if len(each) > 1:
        return all_different(schedule)
    (k,) = each
    period = n if schedule.period is None else math.lcm(math.gcd(schedule.period, n), k)
    block = schedule.turn if turned and schedule.turn else 1
    if k % block == 0:
        return Alike(n, period, block)
    return Alike(n, period, block, stride=k) if block % k == 0 else Alike(n, period)

"""Collectives of the sharded strategy: reduce-scatter and all-gather of each block."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import parse_algorithm
from stretto.collectives.algorithms import (
    ALL_GATHER,
    ALLREDUCE,
    HOST_ALL_GATHER,
    HOST_REDUCE_SCATTER,
    REDUCE_SCATTER,
    doubling,
)
from stretto.collectives.schedule import Schedule, move_to_lane
from stretto.comm.bound_schedule import BoundSchedule
from stretto.comm.collective_executor import CollectiveExecutor
from stretto.comm.transport import (
    CompletedWork,
    NativeShardCollectives,
    Transport,
    Work,
    all_gather_text,
    all_reduce_small_,
)
from stretto.planner.plan import Unit
from stretto.strategies.sharded.config import AUTO
from stretto.strategies.sharded.sharded_unit import ShardedUnit

NUM_LANES = 3
"""Blocks that are in flight concurrently: while one waits for a late rank, another uses the
link."""
NUM_GPU_LANES = 2
"""The same on a GPU, where each lane has connections and threads of its own."""
_SPLIT_BYTES = 1_500_000
"""Blocks of at least this size are sent in two parts, where the algorithm has several phases."""


class ShardCollectives:
    """Schedules that are bound once and run in every step; NCCL's own collectives on a GPU."""

    def __init__(
        self,
        executor: CollectiveExecutor,
        transport: Transport,
        units: Sequence[ShardedUnit],
        algorithm: str,
    ) -> None:
        self._executor, self._transport, self._mesh = executor, transport, transport.mesh
        self._algorithm = algorithm
        self._units = units
        on_gpu = units[0].flat.is_cuda and isinstance(transport, NativeShardCollectives)
        self._uses_native = [on_gpu and algorithm == AUTO and not unit.in_host for unit in units]
        if any(self._uses_native):
            transport.reserve(NUM_GPU_LANES)
        self._bound_schedules = self._bind_schedules()

    def _bind_schedules(self) -> dict[tuple[int, int], tuple[BoundSchedule, BoundSchedule]]:
        schedules = ShardSchedules(self._mesh, self._algorithm)
        jobs: list[tuple[Schedule, Tensor]] = []
        keys: list[tuple[int, int]] = []
        for index, unit in enumerate(self._units):
            if self._uses_native[index]:
                continue
            for block, gradient in enumerate(unit.gradients):
                lane = len(keys) % NUM_LANES
                keys.append((index, block))
                full_block = unit.full_block(block)
                jobs.append((schedules.reduce(unit, gradient.nbytes, lane), gradient))
                jobs.append((schedules.unshard(unit, full_block.nbytes, lane), full_block))
        if not jobs:
            return {}
        prepared, tensors = zip(*jobs, strict=True)
        bound_schedules = iter(self._executor.prepare_all(prepared, tensors))
        return {key: (next(bound_schedules), next(bound_schedules)) for key in keys}

    def reduce(self, unit: int, block: int) -> Work:
        """Start to reduce a block's gradients."""
        if not self._uses_native[unit]:
            return self._executor.start(self._bound_schedules[unit, block][0])
        storage = self._units[unit]
        gradient = storage.gradients[block]
        if not gradient.numel():
            return CompletedWork(time.monotonic())
        if not storage.sharding.shards_optimizer:
            return self._transport.start_all_reduce(gradient)
        assert isinstance(self._transport, NativeShardCollectives)
        return self._transport.start_reduce_scatter(gradient, self.lane(unit, block))

    def unshard(self, unit: int, block: int) -> Work:
        """Start to all-gather a block's parameters."""
        if not self._uses_native[unit]:
            return self._executor.start(self._bound_schedules[unit, block][1])
        full_block = self._units[unit].full_block(block)
        if not full_block.numel():
            return CompletedWork(time.monotonic())
        assert isinstance(self._transport, NativeShardCollectives)
        return self._transport.start_all_gather(full_block, self.lane(unit, block))

    def lane(self, unit: int, block: int) -> int:
        """Return the lane of a block's messages; 0 for schedules, which assign lanes themselves."""
        native = self._uses_native[unit] and self._units[unit].sharding.shards_optimizer
        return (unit + block) % NUM_GPU_LANES if native else 0

    def make_small_all_reduce(self, numel: int) -> Callable[[Tensor], None]:
        """Return a function that all-reduces a float64 tensor of ``numel`` in place (collective).

        It runs concurrently with the blocks' messages and with sums of the training loop. On a CPU
        it therefore uses a lane of its own, behind those of the blocks. A GPU runs all of them in
        order.
        """
        if self._units[0].flat.is_cuda:
            return lambda tensor: all_reduce_small_(tensor, self._transport)
        buffer = torch.zeros(numel, dtype=torch.float64)
        bound_schedules = (bound for pair in self._bound_schedules.values() for bound in pair)
        last_lane = max((lane for bound in bound_schedules for lane in bound.lanes), default=0)
        lane = 1 + max(
            int(lane_of_rank) for lane_of_rank in all_gather_text(str(last_lane), self._transport)
        )
        (bound,) = self._executor.prepare_all(
            [move_to_lane(doubling(self._mesh.size), lane)], [buffer]
        )

        def all_reduce_small(tensor: Tensor) -> None:
            buffer.copy_(tensor.view(-1))
            self._executor.start(bound).wait()
            tensor.view(-1).copy_(buffer)

        return all_reduce_small


@dataclass(frozen=True, slots=True)
class ShardSchedules:
    """The schedules of blocks on a mesh, by the algorithm of the settings."""

    mesh: Mesh
    algorithm: str

    def reduce(self, unit: Unit | ShardedUnit, num_bytes: int, lane: int) -> Schedule:
        """Return the schedule that sums a block's gradients of ``num_bytes``."""
        name, parts = self._choose_algorithm(num_bytes)
        if unit.in_host:
            schedule = HOST_REDUCE_SCATTER["ring"](self.mesh, parts)
        elif unit.sharding.shards_optimizer:
            schedule = REDUCE_SCATTER[name](self.mesh, parts)
        else:
            all_reduce = "hierarchical" if name == "hierarchical" else "ring"
            schedule = ALLREDUCE[all_reduce](self.mesh, parts)
        return self._assign_lane(schedule, lane)

    def unshard(self, unit: Unit | ShardedUnit, num_bytes: int, lane: int) -> Schedule:
        """Return the schedule that gathers a block's parameters of ``num_bytes``."""
        name, parts = self._choose_algorithm(num_bytes)
        if unit.in_host:
            schedule = HOST_ALL_GATHER["ring"](self.mesh, parts)
        else:
            schedule = ALL_GATHER[name](self.mesh, parts)
        return self._assign_lane(schedule, lane)

    def _choose_algorithm(self, num_bytes: int) -> tuple[str, int]:
        if self.algorithm != AUTO:
            return parse_algorithm(self.algorithm, REDUCE_SCATTER)
        if not self._is_nested:
            return "ring", 1
        return "hierarchical", 2 if num_bytes >= _SPLIT_BYTES else 1

    @property
    def _is_nested(self) -> bool:
        even = len(set(self.mesh.ranks_per_host)) == 1
        return even and self.mesh.hosts > 1 and self.mesh.ranks_per_host[0] > 1

    def _assign_lane(self, schedule: Schedule, lane: int) -> Schedule:
        """Move a schedule to ``lane`` if it is a plain ring that the automatic choice picked."""
        keeps_lanes = self._is_nested or self.algorithm != AUTO
        return schedule if keeps_lanes else move_to_lane(schedule, lane)

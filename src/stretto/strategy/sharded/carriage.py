"""The messages of a plan on real tensors: an errand for each block's reduction and gather."""

from collections.abc import Sequence

from torch import Tensor

from stretto.cluster.world import Mesh
from stretto.comm.algorithms import ALL_GATHER, ALLREDUCE, REDUCE_SCATTER
from stretto.comm.algorithms.table import parse_word
from stretto.comm.channel import Pending
from stretto.comm.courier import Courier
from stretto.comm.errand import Errand
from stretto.comm.schedule import Schedule
from stretto.errors import ConfigError
from stretto.strategy.sharded.storage import UnitStorage

AUTO = "auto"
_SPLIT = 128 * 1024
"""From so many bytes on, a block is worth sending in two parts beside each other."""
_KNOWN = tuple(name for name in REDUCE_SCATTER if name in ALL_GATHER)


class Carriage:
    """Errands laid out once, run in every step."""

    def __init__(
        self, courier: Courier, mesh: Mesh, units: Sequence[UnitStorage], algorithm: str
    ) -> None:
        self._courier = courier
        self._mesh = mesh
        self._algorithm = algorithm
        jobs: list[tuple[Schedule, Tensor]] = []
        for unit in units:
            for block, gradient in zip(unit.layout.blocks, unit.gradients, strict=True):
                whole = unit.flat[block.offset : block.offset + block.numel]
                jobs.append((self._reducing(unit, gradient), gradient))
                jobs.append((self._gathering(whole), whole))
        schedules, tensors = zip(*jobs, strict=True)
        errands = iter(courier.prepare_all(schedules, tensors))
        self._errands: list[list[tuple[Errand, Errand]]] = [
            [(next(errands), next(errands)) for _ in unit.layout.blocks] for unit in units
        ]

    def reduce(self, unit: int, block: int) -> Pending:
        """Begin to sum a block's gradients."""
        return self._courier.start(self._errands[unit][block][0])

    def gather(self, unit: int, block: int) -> Pending:
        """Begin to make a block's parameters whole."""
        return self._courier.start(self._errands[unit][block][1])

    def _reducing(self, unit: UnitStorage, tensor: Tensor) -> Schedule:
        name, parts = self._choice(tensor)
        if unit.sharding.is_split:
            return REDUCE_SCATTER[name](self._mesh, parts)
        return ALLREDUCE["hierarchical" if name == "hierarchical" else "ring"](self._mesh, parts)

    def _gathering(self, tensor: Tensor) -> Schedule:
        name, parts = self._choice(tensor)
        return ALL_GATHER[name](self._mesh, parts)

    def _choice(self, tensor: Tensor) -> tuple[str, int]:
        if self._algorithm != AUTO:
            name, parts = parse_word(self._algorithm, _KNOWN)
            if parts not in (1, 2, 4, 8, 16):
                raise ConfigError(
                    f"strategy.algorithm = {self._algorithm!r}: blocks are sent in 1, 2, 4, 8 or 16"
                    " parts"
                )
            return name, parts
        even = len(set(self._mesh.ranks_per_host)) == 1
        nested = even and self._mesh.hosts > 1 and self._mesh.ranks_per_host[0] > 1
        return "hierarchical" if nested else "ring", 2 if tensor.nbytes >= _SPLIT else 1

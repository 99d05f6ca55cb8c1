"""What the lowerings of strategies share: their inputs, blocks of parameters, common operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import AlgorithmTable
from stretto.collectives.schedule import Schedule
from stretto.program.blocks import NamedParameter
from stretto.program.step_program import (
    Group,
    Kind,
    Moment,
    Operation,
    Operations,
    ParameterBlock,
    Payload,
    Source,
)

SAMPLE_COUNT = Payload(1, 8)
"""A number of samples, as float64."""


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """What the lowering of a strategy reads besides its settings."""

    model: nn.Module
    mesh: Mesh
    calls: tuple[str, ...] | None = None
    """Names of the modules that a forward calls, in order, if a forward was traced."""
    reads_gradients: bool = False
    """Whether all gradients are read before the update, for example to clip them."""
    weighs_samples: bool = False
    """Whether ranks sum their numbers of samples, as in a user's own loop."""
    whole_layers: bool = False
    """Whether the optimizer reads whole layers (LARS, LAMB)."""
    choose_table: Callable[[], AlgorithmTable] | None = None
    """Returns the algorithms of averages over all ranks; None: as a run chooses them."""


def block_of(named: Sequence[NamedParameter], unit: int) -> ParameterBlock:
    """Return the block of these parameters, the ``unit``-th in forward."""
    names = tuple(name for name, _ in named)
    return ParameterBlock(names, sum(p.numel() for _, p in named), named[0][1].element_size(), unit)


def world_sum(
    source: Source,
    block: int,
    payload: Payload,
    schedule: Schedule | None,
    window: tuple[Moment, Moment],
) -> Operation:
    """Return an all-reduce over all ranks with the window (gate, due)."""
    return Operation(Kind.ALL_REDUCE, source, block, Group.WORLD, payload, schedule, *window)


def every_step(operations: Sequence[Operation]) -> Operations:
    """Return the function of a program whose steps are all alike."""
    fixed = tuple(operations)
    return lambda _step, _requested: fixed

"""The step program: what every rank does around a training step, as a value.

A strategy is lowered to a `StepProgram`: the blocks of a model, and the operations that leave in
each step. An operation has a *gate*, before which it may not start, and a moment at which it is
*due*. Everything that is known about a strategy before it runs follows from this value.

The moments of a step, in the order in which a rank's main thread passes them::

    backward    BACKWARD b, then GRADIENT b: before the backward of block b, and after it
    update      UPDATE b, then UPDATED b: before the update of block b, and after it
    end         END: all blocks are updated
    forward     FORWARD b: before the forward of block b; it belongs to the next step

Blocks are updated during backward, after it, all at once, or as sums arrive (`Updates`). The block
`ALL` stands for the model: BACKWARD is the start of backward, GRADIENT its end, and so on.

At a moment, operations of earlier steps that are due are applied first. Then gates open. Then
operations of this step that are due are applied, also those whose gate has just opened.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import cached_property
from typing import NamedTuple

from stretto.cluster.world import Mesh
from stretto.collectives.codecs import Codec
from stretto.collectives.schedule import Schedule
from stretto.topology import Topology

ALL = -1
"""The block that stands for the whole model."""
NATIVE_LANE = -1
"""The lane of the back end's own all-reduces, which have an order of their own."""


class Phase(IntEnum):
    """A kind of moment; see the module's text."""

    BACKWARD = 0
    GRADIENT = 1
    UPDATE = 2
    UPDATED = 3
    END = 4
    FORWARD = 5


class Moment(NamedTuple):
    """A moment of a step, or of the step that is ``later`` steps after it."""

    phase: Phase
    block: int = ALL
    later: int = 0

    def __str__(self) -> str:
        block = "" if self.block == ALL else f" {self.block}"
        later = f" + {self.later}" if self.later else ""
        return f"{self.phase.name}{block}{later}"


class Kind(Enum):
    """What an operation does with the ranks of its group."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    EXCHANGE = "exchange"
    """Values are sent to the peers of a round, and theirs are received."""
    CALL = "call"
    """One end asks, the other answers at any time: it waits for nobody's step."""


class Source(Enum):
    """What an operation reads."""

    GRADIENT = "gradient"
    PARAMETER = "parameter"
    CHANGE = "change"
    """The change of the parameters since the last round, or what a round's messages change."""
    SAMPLE = "sample"
    """A few numbers: sampled coordinates, or a count of samples."""

    @property
    def is_model_memory(self) -> bool:
        """Whether the operation works on gradients or parameters themselves, not on a copy."""
        return self in (Source.GRADIENT, Source.PARAMETER)


class Group(Enum):
    """Who takes part in an operation."""

    WORLD = "all ranks"
    INSIDE = "a host or group"
    PEERS = "the peers of a round"


class Applied(Enum):
    """When the result of an operation is used."""

    DUE = "when due"
    ARRIVAL = "on arrival"


class WhenSkipped(Enum):
    """What happens to an operation in a step that is skipped because a value is not finite."""

    TRAVEL = "travels"
    SKIP = "stays"


class Updates(Enum):
    """When the optimizer updates the blocks."""

    IN_BACKWARD = "each block once it has its gradients"
    AFTER_BACKWARD = "one block after another after backward"
    ON_ARRIVAL = "each block when its sum arrives"
    WHOLE = "all blocks at once"


class Placement(Enum):
    """What a rank has of a block's parameters."""

    WHOLE = "all, and it updates all"
    OWN_UPDATE = "all, but it updates its own part"
    SHARDED = "its own part, and all of it from forward to backward"
    SHARDED_TWICE = "its own part, and all of it in forward, and again in backward"

    @property
    def shards_update(self) -> bool:
        """Whether a rank updates its own part, and the others' parts are gathered."""
        return self is not Placement.WHOLE


@dataclass(frozen=True, slots=True)
class ParameterBlock:
    """Parameters that travel together."""

    names: tuple[str, ...]
    """The parameters' names; a block that is a part of a unit has the names of the unit."""
    numel: int
    """Trainable elements, without padding."""
    element_bytes: int
    """Bytes of an element as a parameter."""
    unit: int
    """Position in forward; blocks with the same position are used together."""
    placement: Placement = Placement.WHOLE


@dataclass(frozen=True, slots=True)
class Payload:
    """The tensor of an operation, as it travels."""

    numel: int
    element_bytes: int
    codec: Codec | None = None
    parts: tuple[int, ...] = ()
    """Elements of the parts that a codec encodes by themselves; empty: one part."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor; with a codec, encoded part by part."""
        if self.codec is not None:
            return self.codec.num_bytes(self.parts or (self.numel,))
        return self.numel * self.element_bytes


@dataclass(frozen=True, slots=True)
class PeerRound:
    """A round of gossip between ``groups`` groups of ``width`` ranks: each sends its shard."""

    topology: Topology
    groups: int
    width: int
    number: int
    """Number of the round."""
    segment: int
    """Number of the segment, for topologies that draw peers for each."""


@dataclass(frozen=True, slots=True)
class GroupGather:
    """Every member of a group of ``width`` ranks sends its shard to each other member."""

    round: PeerRound
    """The round whose result is gathered; a rank that received nothing has nothing to gather."""


@dataclass(frozen=True, slots=True)
class PairCall:
    """An average of one active rank with a passive one, at any time."""

    peer_of: Callable[[int, int, int], int | None]
    """(rank, ranks, step) -> the passive peer; None for a rank that calls nobody."""
    step: int
    tensor_bytes: tuple[int, ...]
    """Bytes of each tensor that both ends send."""


Route = Schedule | PeerRound | GroupGather | PairCall | None
"""How an operation travels; None: the back end's own all-reduce."""


class Operation(NamedTuple):
    """One communication of every rank in one step."""

    kind: Kind
    source: Source
    block: int
    group: Group
    payload: Payload
    route: Route
    gate: Moment
    due: Moment
    lane: int = NATIVE_LANE
    """The lane of its messages, which a lane sends one after another; schedules have their own."""
    queue: int = 0
    """Operations of one queue start in the order of the program, whatever happens."""
    applied: Applied = Applied.DUE
    after: int | None = None
    """Index of an operation of the same step whose result this one needs."""
    clears: bool = False
    """Whether it replaces the rounds in flight, for which it waits first."""
    when_skipped: WhenSkipped = WhenSkipped.TRAVEL

    def __str__(self) -> str:
        block = "the model" if self.block == ALL else f"block {self.block}"
        return f"{self.kind.value} of the {self.source.value} of {block}"


@dataclass(frozen=True, slots=True)
class Mixing:
    """What a program promises of models that differ: which block is mixed when, and how late."""

    group: Group
    source: Source = Source.PARAMETER
    every: int = 1
    """Steps between two rounds of a block."""
    remainders: tuple[int, ...] = ()
    """For each block, the remainder of (step + 1) by ``every`` in steps with its round; empty: 0
    for all blocks."""
    late_steps: int = 0
    """Steps after which a round must have been applied."""
    replaced_every: int | None = None
    """Every so many steps an exact average replaces the round."""

    def rounds_of(self, block: int, steps: range) -> list[int]:
        """Return the steps in which ``block`` is exchanged."""
        remainder = self.remainders[block] if self.remainders else 0
        return [
            step
            for step in steps
            if (step + 1) % self.every == remainder
            and not (self.replaced_every and (step + 1) % self.replaced_every == 0)
        ]


Operations = Callable[[int, bool], tuple[Operation, ...]]
"""(step, whether an average of all models was requested) -> the operations that leave in it."""


@dataclass(frozen=True)
class StepProgram:
    """What every rank does around a training step; all ranks have an equal one."""

    name: str
    mesh: Mesh
    blocks: tuple[ParameterBlock, ...]
    operations: Operations
    updates: Updates = Updates.AFTER_BACKWARD
    gradients: Group | None = Group.WORLD
    """Over whom gradients are summed before the update; None: nobody."""
    mixing: Mixing | None = None
    topology: Topology | None = None
    """Who exchanges with whom, where peers do."""
    group_width: int = 1
    """Ranks of a host or group in operations inside it."""
    skips_alone: bool = False
    """Whether a rank whose loss is not finite skips the step alone; otherwise all ranks skip."""
    period: int = 1
    """Steps after which the kinds, gates and payloads of the operations repeat."""
    first_step: int = 0
    """The step from which they repeat."""

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """All moments of a step, in order."""
        units = sorted({block.unit for block in self.blocks})
        by_unit = {
            unit: [index for index, block in enumerate(self.blocks) if block.unit == unit]
            for unit in units
        }
        found = [Moment(Phase.BACKWARD)]
        for unit in reversed(units):
            found += [Moment(Phase.BACKWARD, index) for index in by_unit[unit]]
            found += [Moment(Phase.GRADIENT, index) for index in by_unit[unit]]
            if self.updates is Updates.IN_BACKWARD:
                found += _update_moments(by_unit[unit])
        found.append(Moment(Phase.GRADIENT))
        if self.updates is Updates.AFTER_BACKWARD:
            for unit in reversed(units):
                found += _update_moments(by_unit[unit])
        found += [Moment(Phase.UPDATE), Moment(Phase.UPDATED), Moment(Phase.END)]
        found.append(Moment(Phase.FORWARD))
        for unit in units:
            found += [Moment(Phase.FORWARD, index) for index in by_unit[unit]]
        return tuple(found)

    @cached_property
    def positions(self) -> dict[Moment, int]:
        """The position of each moment in a step."""
        return {moment: index for index, moment in enumerate(self.moments)}

    def position(self, step: int, moment: Moment) -> int:
        """Return the position of ``moment``, as named by an operation of ``step``."""
        in_step = self.positions[moment._replace(later=0)]
        return (step + moment.later) * len(self.moments) + in_step

    def steps(self, periods: int = 1) -> range:
        """Return the steps of the first ``periods`` periods."""
        return range(self.first_step, self.first_step + periods * self.period)

    def leaving(self, step: int) -> tuple[Operation, ...]:
        """Return the operations that leave in ``step`` if no average was requested."""
        return self.operations(step, False)

    def replace_operations(self, operations: Operations) -> "StepProgram":
        """Return the program with other operations."""
        return replace(self, operations=operations)

    def digest(self) -> str:
        """Return a fingerprint of blocks and operations; equal programs have equal digests."""
        text = "\n".join(
            [
                *(repr(block) for block in self.blocks),
                *(_operation_text(one) for step in self.steps() for one in self.leaving(step)),
            ]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _update_moments(blocks: list[int]) -> list[Moment]:
    return [Moment(phase, index) for index in blocks for phase in (Phase.UPDATE, Phase.UPDATED)]


def _operation_text(operation: Operation) -> str:
    route = operation.route
    name = route.name if isinstance(route, Schedule) else type(route).__name__
    payload = operation.payload
    size = f"{payload.numel} x {payload.element_bytes}"
    gate_due = f"{operation.gate} -> {operation.due}"
    return f"{operation} {operation.group} {name} {size} {gate_due} {operation.lane}"

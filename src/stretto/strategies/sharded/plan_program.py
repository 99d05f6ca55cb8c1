"""Lower a plan to a step program: every block of every unit, and each message as an operation.

The slots of a plan are moments of the program: a gate opens when its slot begins, and what is due
in a slot is awaited there. All messages are in one queue, in the order of the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.cluster.world import Mesh
from stretto.collectives.codecs import WIRE_DTYPES
from stretto.errors import ConfigError
from stretto.planner.model_units import ModelUnit
from stretto.planner.plan import MessageKind, Plan, PlanMessage, Sharding
from stretto.planner.presets import add_barrier
from stretto.program.lowering import SAMPLE_COUNT, ProgramInputs, every_step, world_sum
from stretto.program.step_program import (
    ALL,
    Applied,
    Group,
    Kind,
    Moment,
    Operation,
    ParameterBlock,
    Payload,
    Phase,
    Placement,
    Source,
    StepProgram,
    Updates,
)
from stretto.strategies.sharded.assembly import layout_of
from stretto.strategies.sharded.config import ShardedConfig, plan_for, units_of
from stretto.strategies.sharded.shard_collectives import NUM_LANES, ShardSchedules

_PLACEMENTS = {
    Sharding.DP: Placement.WHOLE,
    Sharding.ZERO1: Placement.OWN_UPDATE,
    Sharding.SDP: Placement.OWN_UPDATE,
    Sharding.ZERO2: Placement.SHARDED,
    Sharding.ZERO3: Placement.SHARDED_TWICE,
}


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes of an element as it travels."""

    parameter: int
    gradient: int


def sharded_program(config: ShardedConfig, inputs: ProgramInputs) -> StepProgram:
    """Return the program of the plan that ``config`` selects for the model.

    Raises:
        ConfigError: The run has only a memory limit; its plan must be made first.
    """
    if config.memory is not None:
        raise ConfigError(
            "strategy.memory: the plan is not made yet; make it with `stretto plan`, and set "
            "strategy.plan to the file that it writes"
        )
    units = units_of(config, inputs.model, inputs.calls)
    plan = plan_for(
        config,
        units,
        whole_layers=inputs.whole_layers,
        order_is_known=inputs.calls is not None,
    )
    if inputs.reads_gradients:
        plan = add_barrier(plan)
    lowering = PlanLowering(plan, units, inputs.mesh, config)
    operations = lowering.operations(weighs_samples=inputs.weighs_samples)
    return StepProgram(
        config.kind,
        inputs.mesh,
        lowering.blocks,
        every_step(operations),
        Updates.WHOLE if plan.barrier else Updates.ON_ARRIVAL,
        group_width=max(inputs.mesh.ranks_per_host),
    )


class PlanLowering:
    """Turns the messages of a plan into operations."""

    def __init__(
        self, plan: Plan, units: Sequence[ModelUnit], mesh: Mesh, config: ShardedConfig
    ) -> None:
        self._plan, self._slots, self._mesh = plan, plan.slots, mesh
        self._schedules = ShardSchedules(mesh, config.algorithm)
        self._layouts = [
            layout_of(planned, [p.numel() for p in unit.parameters], mesh)
            for planned, unit in zip(plan.units, units, strict=True)
        ]
        self._bytes = [_unit_bytes(config, unit) for unit in units]
        self._index: dict[tuple[int, int], int] = {}
        blocks: list[ParameterBlock] = []
        for position, (planned, unit) in enumerate(zip(plan.units, units, strict=True)):
            for block, numel in enumerate(planned.blocks):
                self._index[position, block] = len(blocks)
                placement = _PLACEMENTS[planned.sharding]
                element_bytes = self._bytes[position].parameter
                blocks.append(ParameterBlock(unit.names, numel, element_bytes, position, placement))
        self.blocks = tuple(blocks)

    def operations(self, *, weighs_samples: bool) -> tuple[Operation, ...]:
        """Return the operations of a step, in the order of the plan."""
        found: list[Operation] = []
        if weighs_samples:
            gate, due = Moment(Phase.BACKWARD), Moment(Phase.GRADIENT)
            found.append(
                world_sum(Source.SAMPLE, ALL, SAMPLE_COUNT, None, (gate, due))._replace(queue=1)
            )
        reduced: dict[tuple[int, int], int] = {}
        for message in self._plan.messages:
            if message.what is MessageKind.REDUCE:
                reduced[message.unit, message.block] = len(found)
                found.append(self._reduction(message))
            else:
                after = self._update_of(message, reduced)
                found.append(self._unshard(message)._replace(after=after))
        return tuple(found)

    def _update_of(self, message: PlanMessage, reduced: dict[tuple[int, int], int]) -> int | None:
        """Return the reduction whose update makes the block's parameters, if no barrier does."""
        if message.what is not MessageKind.UNSHARD or self._plan.barrier:
            return None
        if not self._plan.whole_layers:
            return reduced[message.unit, message.block]
        return max(index for (unit, _), index in reduced.items() if unit == message.unit)

    def _reduction(self, message: PlanMessage) -> Operation:
        unit, block = message.unit, message.block
        planned, index = self._plan.units[unit], self._index[unit, block]
        layout = self._layouts[unit].blocks[block]
        payload = Payload(layout.gradient_numel, self._bytes[unit].gradient)
        gate = Moment(Phase.GRADIENT, self._last_block(unit))
        if message.gate > self._slots.backward(unit):
            gate = self._begin(message.gate)
        is_sharded = planned.sharding.shards_optimizer
        return Operation(
            Kind.REDUCE_SCATTER if is_sharded else Kind.ALL_REDUCE,
            Source.GRADIENT,
            index,
            Group.WORLD,
            payload,
            self._schedules.reduce(planned, payload.num_bytes, index % NUM_LANES),
            gate,
            self._begin(message.due),
            applied=Applied.ARRIVAL,
        )

    def _unshard(self, message: PlanMessage) -> Operation:
        unit, block = message.unit, message.block
        planned, index = self._plan.units[unit], self._index[unit, block]
        payload = Payload(self._layouts[unit].blocks[block].numel, self._bytes[unit].parameter)
        gate, due = self._begin(message.gate), self._begin(message.due)
        is_in_forward = self._slots.is_forward(message.gate)
        if message.what is MessageKind.UNSHARD and self._plan.barrier and not is_in_forward:
            gate = Moment(Phase.UPDATED)
        elif message.what is MessageKind.UNSHARD_FOR_BACKWARD and is_in_forward:
            due = due._replace(later=1)
        inside = planned.in_host and self._mesh.hosts > 1
        return Operation(
            Kind.ALL_GATHER,
            Source.PARAMETER,
            index,
            Group.INSIDE if inside else Group.WORLD,
            payload,
            self._schedules.unshard(planned, payload.num_bytes, index % NUM_LANES),
            gate,
            due,
            applied=Applied.ARRIVAL,
        )

    def _begin(self, slot: int) -> Moment:
        """Return the moment at which a slot begins."""
        if slot == self._slots.update:
            return Moment(Phase.GRADIENT)
        if self._slots.is_forward(slot):
            return Moment(Phase.FORWARD, self._index[slot - self._slots.update - 1, 0])
        return Moment(Phase.BACKWARD, self._index[self._slots.update - 1 - slot, 0])

    def _last_block(self, unit: int) -> int:
        return self._index[unit, len(self._plan.units[unit].blocks) - 1]


def _unit_bytes(config: ShardedConfig, unit: ModelUnit) -> UnitBytes:
    parameter = (WIRE_DTYPES[config.parameters] or unit.parameters[0].dtype).itemsize
    wire = WIRE_DTYPES[config.wire]
    return UnitBytes(parameter, parameter if wire is None else wire.itemsize)

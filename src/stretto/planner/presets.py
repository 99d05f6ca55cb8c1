"""Plans by name (ddp, zero1, zero2, zero3, dear), and random valid plans for tests.

`build_plan` makes a plan from the moment at which each message should start. It sorts messages by
moment, so no message stands behind one that becomes ready later. If the moments lie inside the
messages' windows, the plan can be executed.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from stretto.planner.check import allowed_window, required_messages
from stretto.planner.plan import MessageKind, Plan, PlanMessage, Sharding, Slots, Unit


class MessageTiming(NamedTuple):
    """The window of one message, and the half slot that decides its place in the order."""

    gate: int
    due: int
    half_slot: int


TimingRule = Callable[[Slots, MessageKind, int, int], MessageTiming]
"""Maps (slots, kind, unit, block) to the timing of a message. It is called for reductions first.
The slots of an unshard for backward may lie beyond the end of the cycle."""


def build_plan(
    units: Sequence[Unit], timing: TimingRule, *, barrier: bool, whole_layers: bool
) -> Plan:
    """Return the plan of ``units`` whose messages start as ``timing`` says."""
    plan = Plan(units=tuple(units), messages=(), barrier=barrier, whole_layers=whole_layers)
    slots = plan.slots
    timed: list[tuple[tuple[int, int, int, int], PlanMessage]] = []
    for what, unit, block in sorted(
        required_messages(plan), key=lambda m: m[0] is not MessageKind.REDUCE
    ):
        gate, due, half_slot = timing(slots, what, unit, block)
        if half_slot >= 2 * slots.count:  # in the next cycle; its gate must be there, too
            half_slot, gate = half_slot - 2 * slots.count, max(gate, slots.count)
        message = PlanMessage(
            what=what, unit=unit, block=block, gate=gate % slots.count, due=due % slots.count
        )
        # At the same moment, reductions go first because unshards wait for them; then earliest due.
        timed.append(((half_slot, what is not MessageKind.REDUCE, due, block), message))
    timed.sort(key=lambda pair: pair[0])
    return plan.replace(messages=tuple(message for _, message in timed))


def add_barrier(plan: Plan) -> Plan:
    """Return ``plan`` changed so that the update waits for all gradients.

    Reductions come first, in their old order. Unshards wait for the update and follow in theirs.
    """
    if plan.barrier:
        return plan
    slots = plan.slots
    early: list[PlanMessage] = []
    late: list[PlanMessage] = []
    for message in plan.messages:
        if message.what is MessageKind.REDUCE:
            gate, due = min(message.gate, slots.update), min(message.due, slots.update)
            early.append(message.model_copy(update={"gate": gate, "due": due}))
        elif message.what is MessageKind.UNSHARD:
            gate = max(message.gate, slots.update)
            late.append(message.model_copy(update={"gate": gate}))
        else:
            (late if slots.is_forward(message.gate) else early).append(message)
    return plan.replace(messages=(*early, *late), barrier=True)


@dataclass(frozen=True, slots=True)
class UnitShape:
    """The properties of a unit that a preset needs."""

    name: str
    numel: int
    used_often: bool = False


@dataclass(frozen=True, slots=True)
class PresetOptions:
    """The settings that a preset leaves open."""

    prefetch: int | None = None
    """How many units ahead of the running one may be unsharded; None: all."""
    reduce_slots: int | None = None
    """Slots for which a gradient may wait for its reduction; None: until it is needed."""
    block: int | None = None
    """Most elements of a block; None: each unit is one block."""
    barrier: bool = False
    whole_layers: bool = False
    in_host: bool = False
    checkpoint: bool = False


_NO_OPTIONS = PresetOptions()


def preset_plan(
    name: str, shapes: Sequence[UnitShape], preset_options: PresetOptions = _NO_OPTIONS
) -> Plan:
    """Return the preset ``name`` for units of these shapes."""
    return PLAN_PRESETS[name](shapes, preset_options)


def random_plan(shapes: Sequence[UnitShape], seed: int, *, whole_layers: bool = False) -> Plan:
    """Return a valid plan with random sharding, blocks and windows."""
    rng = random.Random(seed)
    in_host = rng.random() < 0.2
    barrier = rng.random() < 0.25
    units = [
        _make_unit(
            shape,
            _draw_sharding(shape, rng),
            rng.random() < 0.3,
            _draw_block_lengths(shape, rng),
            in_host and rng.random() < 0.5,
        )
        for shape in shapes
    ]
    bare = Plan(units=tuple(units), messages=(), barrier=barrier)
    reduced: dict[tuple[int, int], int] = {}

    def timing(slots: Slots, what: MessageKind, unit: int, block: int) -> MessageTiming:
        first_slot, due = allowed_window(bare, what, unit)
        earliest_half_slot = 2 * first_slot
        if what is MessageKind.REDUCE:
            earliest_half_slot, due = earliest_half_slot + 1, rng.randint(first_slot + 1, due)
        if what is MessageKind.UNSHARD:
            blocks = range(len(units[unit].blocks)) if whole_layers else (block,)
            reduce_half_slots = [reduced[unit, one] for one in blocks]
            earliest_half_slot = max(
                earliest_half_slot, *reduce_half_slots, 2 * slots.update + 1 if barrier else 0
            )
        half_slot = rng.randint(earliest_half_slot, 2 * due)
        if what is MessageKind.REDUCE:
            reduced[unit, block] = half_slot
        return MessageTiming(rng.randint(first_slot, half_slot // 2), due, half_slot)

    return build_plan(units, timing, barrier=barrier, whole_layers=whole_layers)


def _draw_sharding(shape: UnitShape, rng: random.Random) -> Sharding:
    kinds = [kind for kind in Sharding if not (shape.used_often and kind is Sharding.ZERO3)]
    return rng.choice(kinds)


def _draw_block_lengths(shape: UnitShape, rng: random.Random) -> tuple[int, ...]:
    count = rng.choice([1, 1, 2, 3])
    inner = range(1, shape.numel)
    bounds = [0, *sorted(rng.sample(inner, min(count - 1, len(inner)))), shape.numel]
    return tuple(stop - start for start, stop in pairwise(bounds))


def _make_unit(
    shape: UnitShape,
    sharding: Sharding,
    checkpoint: bool,
    blocks: tuple[int, ...],
    in_host: bool = False,
) -> Unit:
    return Unit(
        name=shape.name,
        numel=shape.numel,
        sharding=sharding,
        blocks=blocks,
        checkpoint=checkpoint and not shape.used_often,
        in_host=in_host and sharding.shards_optimizer,
        used_often=shape.used_often,
    )


def even_block_lengths(numel: int, block: int | None) -> tuple[int, ...]:
    """Split ``numel`` elements into the fewest blocks of at most ``block``, all of similar size."""
    count = 1 if block is None else -(-numel // block)
    bounds = [numel * i // count for i in range(count + 1)]
    return tuple(stop - start for start, stop in pairwise(bounds))


def _uniform_plan(
    kind: Sharding, shapes: Sequence[UnitShape], preset_options: PresetOptions
) -> Plan:
    """Return the plan in which all units have the same sharding."""
    return _eager_plan([kind] * len(shapes), shapes, preset_options)


def _zero3_plan(shapes: Sequence[UnitShape], preset_options: PresetOptions) -> Plan:
    """Return the plan that reshards each unit after forward unless backward needs it at once."""
    last = len(shapes) - 1
    is_kept = [shape.used_often or index == last for index, shape in enumerate(shapes)]
    return _eager_plan(
        [Sharding.ZERO2 if keep else Sharding.ZERO3 for keep in is_kept], shapes, preset_options
    )


def _eager_plan(
    kinds: Sequence[Sharding], shapes: Sequence[UnitShape], preset_options: PresetOptions
) -> Plan:
    """Return a plan that reduces in backward order and unshards in the order of use, early."""
    units = [
        _make_unit(
            shape,
            kind,
            preset_options.checkpoint,
            even_block_lengths(shape.numel, preset_options.block),
            preset_options.in_host,
        )
        for shape, kind in zip(shapes, kinds, strict=True)
    ]
    prefetch_slots = (
        preset_options.prefetch if preset_options.prefetch is not None else 2 * len(units) + 1
    )

    def timing(slots: Slots, what: MessageKind, unit: int, _block: int) -> MessageTiming:
        backward, forward = slots.backward(unit), slots.forward(unit)
        if what is MessageKind.REDUCE:
            last = slots.update if preset_options.barrier else forward
            due = (
                last
                if preset_options.reduce_slots is None
                else min(last, backward + 1 + preset_options.reduce_slots)
            )
            return MessageTiming(backward, due, 2 * backward + 1)
        if what is MessageKind.UNSHARD:
            gate = max(forward - prefetch_slots, slots.update)
            # Unshards follow all reductions, in the order of use.
            return MessageTiming(gate, forward, max(2 * gate, 2 * slots.update + 1))
        used = slots.count + backward
        gate = max(used - prefetch_slots, forward + 1)
        return MessageTiming(gate, used, 2 * gate)

    return build_plan(
        units, timing, barrier=preset_options.barrier, whole_layers=preset_options.whole_layers
    )


PLAN_PRESETS: Mapping[str, Callable[[Sequence[UnitShape], PresetOptions], Plan]] = {
    "ddp": partial(_uniform_plan, Sharding.DP),
    "zero1": partial(_uniform_plan, Sharding.ZERO1),
    "zero2": partial(_uniform_plan, Sharding.ZERO2),
    "zero3": _zero3_plan,
    "dear": partial(_uniform_plan, Sharding.SDP),
}
"""The presets by name. `PresetOptions` holds the settings that each leaves open."""

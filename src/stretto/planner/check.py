"""Check whether a plan can be executed; refuse it with the reason and the slot if not.

A plan has no deadlock if every message can start before the slot that waits for it. A message
starts once its gate slot is reached, its data is ready, and all messages before it in the plan have
started.
"""

from collections import Counter
from collections.abc import Iterator

from stretto.errors import ConfigError
from stretto.planner.plan import MessageKind, Plan, PlanMessage, Sharding, Slots


class PlanError(ConfigError):
    """A plan that cannot be executed, or not on these ranks."""


def check(plan: Plan) -> None:
    """Check that ``plan`` can be executed.

    Raises:
        PlanError: It cannot. The text names the first reason found, the message and the slot.
    """
    _check_units(plan)
    _check_each_message_once(plan)
    for message in plan.messages:
        _check_window(plan, message)
    _check_order(plan)
    _check_no_deadlock(plan)


def required_messages(plan: Plan) -> Iterator[tuple[MessageKind, int, int]]:
    """Yield the messages that the units' sharding needs, as (kind, unit, block)."""
    for index, unit in enumerate(plan.units):
        for block in range(len(unit.blocks)):
            yield MessageKind.REDUCE, index, block
            if unit.sharding.shards_optimizer:
                yield MessageKind.UNSHARD, index, block
            if unit.sharding is Sharding.ZERO3:
                yield MessageKind.UNSHARD_FOR_BACKWARD, index, block


def allowed_window(plan: Plan, what: MessageKind, unit: int) -> tuple[int, int]:
    """Return the earliest gate and the latest due slot that a message may have.

    An unshard for backward belongs to the backward that follows, so its slots may exceed the cycle.
    """
    slots = plan.slots
    backward, forward = slots.backward(unit), slots.forward(unit)
    if what is MessageKind.UNSHARD_FOR_BACKWARD:
        return forward + 1, slots.count + backward
    if what is MessageKind.REDUCE:
        return backward, slots.update if plan.barrier else forward
    return (slots.update if plan.barrier else backward + 1), forward


def ready_half_slot(plan: Plan, message: PlanMessage) -> int:
    """Return the earliest half slot at which ``message`` may start, counted in its own cycle."""
    slots, half_slot = plan.slots, 2 * message.gate
    if message.what is MessageKind.REDUCE:
        return max(half_slot, 2 * slots.backward(message.unit) + 1)
    if message.what is MessageKind.UNSHARD and plan.barrier:
        return max(half_slot, 2 * slots.update + 1)
    return half_slot


def describe_message(plan: Plan, message: PlanMessage) -> str:
    """Return the text that names ``message`` in error messages."""
    unit = plan.units[message.unit]
    block = f", block {message.block}" if len(unit.blocks) > 1 else ""
    return f"{message.what} of unit {message.unit} ({unit.name}{block})"


def _check_units(plan: Plan) -> None:
    if not plan.units:
        raise PlanError("a plan without units: there is nothing to train")
    for index, unit in enumerate(plan.units):
        if sum(unit.blocks) != unit.numel:
            raise PlanError(
                f"unit {index} ({unit.name}) has {unit.numel} elements, its blocks "
                f"{sum(unit.blocks)}"
            )
        if unit.in_host and not unit.sharding.shards_optimizer:
            raise PlanError(
                f"unit {index} ({unit.name}) is {unit.sharding}, which keeps all of it on every "
                "rank: it cannot be sharded inside a host (in_host)"
            )
        if unit.used_often and unit.checkpoint:
            raise PlanError(
                f"unit {index} ({unit.name}) is also used after its own forward: its activations "
                "cannot be recomputed with this unit alone; remove checkpoint from it"
            )
        if unit.used_often and unit.sharding is Sharding.ZERO3:
            raise PlanError(
                f"unit {index} ({unit.name}) is zero3, which reshards it at the end of "
                f"{plan.slots.name(plan.slots.forward(index))}, but it is used again later: use "
                "zero2"
            )


def _check_each_message_once(plan: Plan) -> None:
    required = Counter(required_messages(plan))
    present = Counter((m.what, m.unit, m.block) for m in plan.messages)
    for (what, unit, block), count in present.items():
        if unit >= len(plan.units) or block >= len(plan.units[unit].blocks):
            raise PlanError(f"{what} of unit {unit}, block {block}: there is no such block")
        if (what, unit, block) not in required:
            name = plan.units[unit].sharding
            raise PlanError(f"{what} of unit {unit}, block {block}: {name} has no such message")
        if count > 1:
            raise PlanError(f"{what} of unit {unit}, block {block} is there {count} times")
    missing = next(iter(required - present), None)
    if missing is not None:
        what, unit, block = missing
        raise PlanError(
            f"{what} of unit {unit} ({plan.units[unit].name}), block {block} is missing"
        )


def _check_window(plan: Plan, message: PlanMessage) -> None:
    slots = plan.slots
    first, last = allowed_window(plan, message.what, message.unit)
    gate, due = unwrapped_window(slots, message)
    earliest_due = slots.backward(message.unit) + 1 if message.what is MessageKind.REDUCE else last
    beyond = max(message.gate, message.due) >= slots.count
    if not first <= gate <= due <= last or due < earliest_due or beyond:
        at = slots.name(message.gate)
        raise PlanError(
            f"{describe_message(plan, message)} may begin from slot {message.gate} ({at}) on and "
            f"is due at {message.due} ({slots.name(message.due)}): expected from "
            f"{slots.name(first)} on, due between {slots.name(earliest_due)} and {slots.name(last)}"
        )


def unwrapped_window(slots: Slots, message: PlanMessage) -> tuple[int, int]:
    """Return gate and due without wrap-around: an unshard for backward is due in the next cycle."""
    if message.what is not MessageKind.UNSHARD_FOR_BACKWARD:
        return message.gate, message.due
    gate = message.gate if slots.is_forward(message.gate) else message.gate + slots.count
    return gate, message.due + slots.count


def _check_order(plan: Plan) -> None:
    """Check that every unshard stands behind the reductions that its update needs."""
    reduced: set[tuple[int, int]] = set()
    for message in plan.messages:
        if message.what is MessageKind.REDUCE:
            reduced.add((message.unit, message.block))
        if message.what is not MessageKind.UNSHARD:
            continue
        blocks = range(len(plan.units[message.unit].blocks))
        for block in blocks if plan.whole_layers else (message.block,):
            if (message.unit, block) not in reduced:
                raise PlanError(
                    f"{describe_message(plan, message)}, which may begin at slot {message.gate} "
                    f"({plan.slots.name(message.gate)}), stands before the reduction of block "
                    f"{block}, on which its update waits"
                )


def _check_no_deadlock(plan: Plan) -> None:
    """Check that every message can start before the slot that waits for it."""
    slots, cycle = plan.slots, 2 * plan.slots.count
    latest, behind = -cycle, plan.messages[0]
    for message in plan.messages * 2:  # the last messages of a cycle delay the next cycle's
        half_slot = ready_half_slot(plan, message)
        if half_slot > latest:
            latest, behind = half_slot, message
        due_in_next_cycle = message.what is MessageKind.UNSHARD_FOR_BACKWARD and slots.is_forward(
            message.gate
        )
        due = message.due + slots.count if due_in_next_cycle else message.due
        if latest > 2 * due:
            raise PlanError(
                f"slot {message.due} ({slots.name(message.due)}) waits for the "
                f"{describe_message(plan, message)}, which stands behind the "
                f"{describe_message(plan, behind)}, and that cannot begin before the end of slot "
                f"{slots.name(latest // 2)}"
            )
        if message is plan.messages[-1]:
            latest -= cycle

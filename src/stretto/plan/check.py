"""Whether a plan can be carried out: refused with the reason and the slot, or nothing said.

Nobody waits in a circle: a message begins when its slot has come, what it carries is there and all
before it have begun; a slot waits for the messages due at it. So it is enough that no message can
begin only after the slot that waits for it.
"""

from collections import Counter
from collections.abc import Iterator

from stretto.errors import ConfigError
from stretto.plan.slots import Slots
from stretto.plan.value import Message, Plan, Sharding, What


class PlanError(ConfigError):
    """A plan that cannot be carried out, or not on these ranks."""


def check(plan: Plan) -> None:
    """Say why ``plan`` cannot be carried out, if so.

    Raises:
        PlanError: With the first reason found, the message and the slot.
    """
    _check_units(plan)
    _check_once_each(plan)
    for message in plan.messages:
        _check_window(plan, message)
    _check_order(plan)
    _check_waits(plan)


def needed(plan: Plan) -> Iterator[tuple[What, int, int]]:
    """Yield what the units' sharding asks for: each communication of each block."""
    for index, unit in enumerate(plan.units):
        for block in range(len(unit.blocks)):
            yield What.REDUCE, index, block
            if unit.sharding.is_split:
                yield What.GATHER, index, block
            if unit.sharding is Sharding.ZERO3:
                yield What.REGATHER, index, block


def window(plan: Plan, what: What, unit: int) -> tuple[int, int]:
    """Return the slots in which a message may have its gate and be due, first and last.

    Those of a regather may be in the next cycle: it belongs to the backward that follows.
    """
    slots = plan.slots
    backward, forward = slots.backward(unit), slots.forward(unit)
    if what is What.REGATHER:
        return forward + 1, slots.count + backward
    if what is What.REDUCE:
        return backward, slots.update if plan.barrier else forward
    return (slots.update if plan.barrier else backward + 1), forward


def ready_moment(plan: Plan, message: Message) -> int:
    """Return the half slot from which on ``message`` may begin, seen from its own cycle."""
    slots, moment = plan.slots, 2 * message.gate
    if message.what is What.REDUCE:
        return max(moment, 2 * slots.backward(message.unit) + 1)
    if message.what is What.GATHER and plan.barrier:
        return max(moment, 2 * slots.update + 1)
    return moment


def describe(plan: Plan, message: Message) -> str:
    """Return what people call ``message``."""
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
        if unit.in_host and not unit.sharding.is_split:
            raise PlanError(
                f"unit {index} ({unit.name}) is {unit.sharding}, of which every rank keeps all: it "
                "cannot be shared out in a host (in_host)"
            )
        if unit.used_often and unit.checkpoint:
            raise PlanError(
                f"unit {index} ({unit.name}) is used after its own forward, too: its activations "
                "cannot be computed again with it alone; take checkpoint off it"
            )
        if unit.used_often and unit.sharding is Sharding.ZERO3:
            raise PlanError(
                f"unit {index} ({unit.name}) is zero3, which lets it go at the end of "
                f"{plan.slots.name(plan.slots.forward(index))}, but it is used again later: take "
                "zero2"
            )


def _check_once_each(plan: Plan) -> None:
    wanted = Counter(needed(plan))
    there = Counter((m.what, m.unit, m.block) for m in plan.messages)
    for (what, unit, block), count in there.items():
        if unit >= len(plan.units) or block >= len(plan.units[unit].blocks):
            raise PlanError(f"{what} of unit {unit}, block {block}: there is no such block")
        if (what, unit, block) not in wanted:
            name = plan.units[unit].sharding
            raise PlanError(f"{what} of unit {unit}, block {block}: {name} has no such message")
        if count > 1:
            raise PlanError(f"{what} of unit {unit}, block {block} is there {count} times")
    missing = next(iter(wanted - there), None)
    if missing is not None:
        what, unit, block = missing
        raise PlanError(
            f"{what} of unit {unit} ({plan.units[unit].name}), block {block} is missing"
        )


def _check_window(plan: Plan, message: Message) -> None:
    slots = plan.slots
    first, last = window(plan, message.what, message.unit)
    gate, due = own_slots(slots, message)
    earliest_due = slots.backward(message.unit) + 1 if message.what is What.REDUCE else last
    beyond = max(message.gate, message.due) >= slots.count
    if not first <= gate <= due <= last or due < earliest_due or beyond:
        at = slots.name(message.gate)
        raise PlanError(
            f"{describe(plan, message)} may begin from slot {message.gate} ({at}) on and is due at "
            f"{message.due} ({slots.name(message.due)}): expected from {slots.name(first)} on, due "
            f"between {slots.name(earliest_due)} and {slots.name(last)}"
        )


def own_slots(slots: Slots, message: Message) -> tuple[int, int]:
    """Return gate and due, counted from the cycle before the backward that a regather is for."""
    if message.what is not What.REGATHER:
        return message.gate, message.due
    gate = message.gate if slots.is_forward(message.gate) else message.gate + slots.count
    return gate, message.due + slots.count


def _check_order(plan: Plan) -> None:
    """See that what is gathered has been reduced and updated before."""
    reduced: set[tuple[int, int]] = set()
    for message in plan.messages:
        if message.what is What.REDUCE:
            reduced.add((message.unit, message.block))
        if message.what is not What.GATHER:
            continue
        blocks = range(len(plan.units[message.unit].blocks))
        for block in blocks if plan.whole_layers else (message.block,):
            if (message.unit, block) not in reduced:
                raise PlanError(
                    f"{describe(plan, message)}, which may begin at slot {message.gate} "
                    f"({plan.slots.name(message.gate)}), stands before the reduction of block "
                    f"{block}, on which its update waits"
                )


def _check_waits(plan: Plan) -> None:
    """See that every message can have begun when its slot waits for it."""
    slots, cycle = plan.slots, 2 * plan.slots.count
    latest, behind = -cycle, plan.messages[0]
    for message in plan.messages * 2:  # what stands at a cycle's end is before the next one's
        moment = ready_moment(plan, message)
        if moment > latest:
            latest, behind = moment, message
        late_regather = message.what is What.REGATHER and slots.is_forward(message.gate)
        due = message.due + slots.count if late_regather else message.due
        if latest > 2 * due:
            raise PlanError(
                f"slot {message.due} ({slots.name(message.due)}) waits for the "
                f"{describe(plan, message)}, which stands behind the {describe(plan, behind)}, and "
                f"that cannot begin before the end of slot {slots.name(latest // 2)}"
            )
        if message is plan.messages[-1]:
            latest -= cycle

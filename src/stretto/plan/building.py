"""Plans from moments: say when each message should begin, and the order follows.

Whatever moments are chosen inside the windows, the plan made of them can be carried out: messages
are sorted by moment, so none stands behind one that becomes possible only later.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stretto.plan.check import needed
from stretto.plan.slots import Slots
from stretto.plan.value import Message, Plan, Unit, What


class When(NamedTuple):
    """The slots of one message, and the half slot by which it is put in order."""

    gate: int
    due: int
    moment: int


Timing = Callable[[Slots, What, int, int], When]
"""From the cycle, a sort of message, a unit and a block to when it should begin; asked for all
reductions first. A regather's slots may be counted beyond the cycle's end."""


def build(units: Sequence[Unit], timing: Timing, *, barrier: bool, whole_layers: bool) -> Plan:
    """Return the plan of ``units`` whose messages begin as ``timing`` says."""
    plan = Plan(units=tuple(units), messages=(), barrier=barrier, whole_layers=whole_layers)
    slots = plan.slots
    timed: list[tuple[tuple[int, int, int, int], Message]] = []
    for what, unit, block in sorted(needed(plan), key=lambda m: m[0] is not What.REDUCE):
        gate, due, moment = timing(slots, what, unit, block)
        if moment >= 2 * slots.count:  # in the next cycle, of which the gate must be, too
            moment, gate = moment - 2 * slots.count, max(gate, slots.count)
        message = Message(
            what=what, unit=unit, block=block, gate=gate % slots.count, due=due % slots.count
        )
        # At one moment: reductions first, which others wait for; then whatever is due first.
        timed.append(((moment, what is not What.REDUCE, due, block), message))
    timed.sort(key=lambda pair: pair[0])
    return plan.replace(messages=tuple(message for _, message in timed))


def with_barrier(plan: Plan) -> Plan:
    """Return ``plan`` for somebody who reads all gradients before the update.

    Reductions keep their order and come first; gathers, which then wait for the update, keep
    theirs behind them.
    """
    if plan.barrier:
        return plan
    slots = plan.slots
    early: list[Message] = []
    late: list[Message] = []
    for message in plan.messages:
        if message.what is What.REDUCE:
            gate, due = min(message.gate, slots.update), min(message.due, slots.update)
            early.append(message.model_copy(update={"gate": gate, "due": due}))
        elif message.what is What.GATHER:
            gate = max(message.gate, slots.update)
            late.append(message.model_copy(update={"gate": gate}))
        else:
            (late if slots.is_forward(message.gate) else early).append(message)
    return plan.replace(messages=(*early, *late), barrier=True)

"""The order of messages: whoever is needed first goes first, as soon as it may.

A run is followed in which the link, whenever it is free, takes the message that must go soonest of
those that may; the order in which they went is the plan's.
"""

from collections.abc import Sequence

from stretto.plan.clock import Stretch
from stretto.plan.pace import Urgent
from stretto.plan.profile import Profile
from stretto.plan.value import Message, Plan, What

_CYCLES = 3
_ROUNDS = 2


def put_in_order(plan: Plan, profile: Profile) -> Plan | None:
    """Return ``plan`` with its messages in the order in which they are needed.

    None if no two steps go alike.
    """
    lengths = profile.lengths([unit.checkpoint for unit in plan.units], barrier=plan.barrier)
    slots, at_s = [], 0.0
    for length in lengths:
        slots.append(Stretch(at_s, at_s + length))
        at_s += length
    ordered: Plan | None = None
    for _ in range(_ROUNDS):
        clock = Urgent(plan, profile, _latest(plan, profile, slots, at_s), at_s)
        for _ in range(_CYCLES):
            cycle = clock.run_cycle()
        slots, at_s = cycle.slots, cycle.step_s
        ordered = _as_gone(plan, clock) or ordered
    return ordered


def _latest(plan: Plan, profile: Profile, slots: Sequence[Stretch], step_s: float) -> list[float]:
    """Return when each message must begin so that nobody waits, if no other were in its way."""
    gathers = {(m.unit, m.block): m for m in plan.messages if m.what is What.GATHER}
    latest: list[float] = []
    for message in plan.messages:
        ahead = message.what is What.REGATHER and plan.slots.is_forward(message.gate)
        due_s = slots[message.due].start_s + step_s * ahead
        followed = gathers.get((message.unit, message.block))
        if message.what is What.REDUCE and followed is not None:
            used_s = slots[followed.due].start_s
            due_s = min(due_s, used_s - profile.message_s(plan, followed))
        latest.append(due_s - profile.message_s(plan, message))
    return latest


def _as_gone(plan: Plan, clock: Urgent) -> Plan | None:
    """Return the plan in the order of a run's last cycle."""
    gone: list[Message] = []
    for cycle, index in clock.order:
        message = plan.messages[index]
        if cycle < clock.cycle and plan.slots.is_forward(message.gate):
            # It went only in the backward for which it was: so it may begin there.
            message = message.model_copy(update={"gate": 0})
        gone.append(message)
    once = {(m.what, m.unit, m.block) for m in gone}
    if len(once) != len(gone) or len(gone) != len(plan.messages):
        return None
    return plan.replace(messages=tuple(gone))

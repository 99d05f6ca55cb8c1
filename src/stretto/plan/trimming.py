"""Windows as wide as they are needed, and a little more.

A window that is wider than a plan needs costs nothing on paper. In a run it lets a rank go ahead of
the others, which then must do without its share of cores and links; and it keeps memory that nobody
asked for. So windows end a few slots after their message is over, and begin a few before it does.
"""

from bisect import bisect_left, bisect_right

from stretto.plan.profile import Profile
from stretto.plan.timing import Timed, time_plan
from stretto.plan.value import Message, Plan, What

_SLACK = 2
"""Slots that a message may be late, or early, before it waits or somebody waits for it."""


def trimmed(plan: Plan, profile: Profile) -> Plan:
    """Return ``plan`` with narrower windows; a step takes as long."""
    timed = time_plan(plan, profile)
    messages = tuple(
        _narrowed(plan, message, timed, index) for index, message in enumerate(plan.messages)
    )
    return plan.replace(messages=messages)


def _narrowed(plan: Plan, message: Message, timed: Timed, index: int) -> Message:
    start_s, end_s = timed.messages[index]
    if message.what is What.REDUCE:
        over = bisect_left([slot.start_s for slot in timed.slots], end_s - 1e-12)
        return message.model_copy(update={"due": min(message.due, over + _SLACK)})
    # On its side of the turn, where the order of its cycle has it.
    entered = [timed.slots[-1].end_s - timed.step_s, *(slot.end_s for slot in timed.slots)]
    began = bisect_right(entered[:-1], start_s + 1e-12) - 1
    forward = plan.slots.is_forward(message.gate)
    if message.what is What.REGATHER and forward and start_s >= timed.step_s:
        began = plan.slots.count - 1
    return message.model_copy(update={"gate": max(message.gate, began - _SLACK)})

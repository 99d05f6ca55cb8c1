"""The order of messages: whoever is needed first goes first, as soon as it may.

A run is followed in which the link, whenever it is free, takes the message that must go soonest of
those that may; the order in which they went is the plan's.
"""

import heapq
from collections.abc import Iterable, Sequence

from stretto.plan.clock import Clock, Stretch
from stretto.plan.profile import Profile
from stretto.plan.value import Message, Plan, What

_CYCLES = 3
_ROUNDS = 2


class _MostUrgent:
    """A line in which those who must go soonest go first, if they may."""

    def __init__(self, latest_s: Sequence[float], step_s: float) -> None:
        self._latest_s, self._step_s = latest_s, step_s
        self._later: list[tuple[int, int, int]] = []
        self._now: list[tuple[float, int, int]] = []
        self._new: list[tuple[int, int]] = []

    def queue(self, cycle: int, messages: Iterable[int]) -> None:
        self._new += [(cycle, index) for index in messages]

    def take(self, clock: Clock) -> tuple[int, int] | None:
        for cycle, index in self._new:
            heapq.heappush(self._later, (clock.ready(cycle, index), cycle, index))
        self._new.clear()
        while self._later and self._later[0][0] <= clock.moment:
            _, cycle, index = heapq.heappop(self._later)
            urgency = self._latest_s[index] + cycle * self._step_s
            heapq.heappush(self._now, (urgency, cycle, index))
        passed: list[tuple[float, int, int]] = []
        found: tuple[int, int] | None = None
        while self._now and clock.is_idle():
            one = heapq.heappop(self._now)
            if clock.has_room(one[2]) and clock.made(one[2]):
                found = one[1:]
                break
            passed.append(one)
        for one in passed:
            heapq.heappush(self._now, one)
        return found


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
        line = _MostUrgent(_latest(plan, profile, slots, at_s), at_s)
        clock = Clock(plan, profile, line)
        clock.run_forward()
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


def _as_gone(plan: Plan, clock: Clock) -> Plan | None:
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

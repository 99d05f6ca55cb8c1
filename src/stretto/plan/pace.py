"""A run of a plan over a link that carries one message at a time: the planner's quick clock.

The rules are those of `stretto.plan.clock`, which knows links with several lanes, too. With one
lane nothing happens between two moments but that one message follows another: the end of each is
known when it is handed over.
"""

import heapq
from collections.abc import Sequence

from stretto.plan.check import ready_moment
from stretto.plan.clock import Cycle, Stretch
from stretto.plan.profile import Profile
from stretto.plan.value import Message, Plan, What


class Pace:
    """A run as far as it has come, its messages in the plan's order."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.plan, self._slots = plan, plan.slots
        checkpoints = [unit.checkpoint for unit in plan.units]
        self._lengths = profile.lengths(checkpoints, barrier=plan.barrier)
        self._slowdown = profile.slowdown
        self._durations = [profile.message_s(plan, m) for m in plan.messages]
        self._ready = [ready_moment(plan, message) for message in plan.messages]
        self._dues: list[list[int]] = [[] for _ in range(self._slots.count)]
        for index, message in enumerate(plan.messages):
            self._dues[message.due].append(index)
        self._now_s = self._link_s = 0.0
        self.cycle = -1
        self._begun = [0.0] * len(plan.messages)
        self._ends = [0.0] * len(plan.messages)
        self._waiting = [(self._ready[i] - self._span, i) for i in self._first_forward()]
        self._gone = 0
        self._run_slots(range(self._slots.update + 1, self._slots.count))

    @property
    def _span(self) -> int:
        """Moments of a cycle."""
        return 2 * self._slots.count

    def _first_forward(self) -> list[int]:
        return [i for i, m in enumerate(self.plan.messages) if _is_of_first_forward(self.plan, m)]

    def run_cycle(self) -> Cycle:
        """Run a backward, the update, and the forward of the next step."""
        self.cycle += 1
        began_s = self._now_s
        self._queue()
        ran = self._run_slots(range(self._slots.count))
        slots = [Stretch(start - began_s, end - began_s) for start, end in ran]
        pairs = zip(self._begun, self._ends, strict=True)
        messages = [Stretch(start - began_s, end - began_s) for start, end in pairs]
        return Cycle(self._now_s - began_s, slots, messages)

    def _queue(self) -> None:
        """Let the messages of a cycle stand behind those that are left."""
        later = self.cycle * self._span
        left = self._waiting[self._gone :]
        self._waiting = left + [(ready + later, i) for i, ready in enumerate(self._ready)]
        self._gone = 0

    def _run_slots(self, slots: range) -> list[tuple[float, float]]:
        ran: list[tuple[float, float]] = []
        first = self.cycle * self._span
        for slot in slots:
            self._arrive(first + 2 * slot)
            for index in self._dues[slot]:
                self._await(index)
            start_s = self._now_s
            self._compute(self._lengths[slot])
            ran.append((start_s, self._now_s))
            self._arrive(first + 2 * slot + 1)
        return ran

    def _arrive(self, moment: int) -> None:
        waiting, gone = self._waiting, self._gone
        while gone < len(waiting) and waiting[gone][0] <= moment:
            self._carry(waiting[gone][1])
            gone += 1
        self._gone = gone

    def _carry(self, index: int) -> None:
        """Hand a message over to the link."""
        self._begun[index] = max(self._link_s, self._now_s)
        self._link_s = self._ends[index] = self._begun[index] + self._durations[index]

    def _await(self, index: int) -> None:
        self._now_s = max(self._now_s, self._ends[index])

    def _compute(self, work_s: float) -> None:
        busy_s = max(self._link_s - self._now_s, 0.0)
        if busy_s >= work_s * self._slowdown:
            self._now_s += work_s * self._slowdown
        else:
            self._now_s += work_s + busy_s * (1 - 1 / self._slowdown)


class Urgent(Pace):
    """A run in which the link, whenever it is free, takes whoever must go soonest.

    ``latest_s`` says when that is, for each message, in a step of ``step_s``.
    """

    def __init__(
        self, plan: Plan, profile: Profile, latest_s: Sequence[float], step_s: float
    ) -> None:
        self._latest_s, self._step_s = latest_s, step_s
        self._heap: list[tuple[float, int, int]] = []
        self.order: list[tuple[int, int]] = []
        """Who has gone in this cycle, with the cycle whose message it is."""
        self._standing = [0] * len(plan.messages)
        self._blocks_left: dict[int, int] = {}
        self._followers = _followers(plan)
        self._unmade: set[tuple[int, int]] = set()
        super().__init__(plan, profile)

    def _queue(self) -> None:
        self.order.clear()
        self._unmade = {(self.cycle, i) for mine in self._followers.values() for i in mine}
        reductions = (m.unit for m in self.plan.messages if m.what is What.REDUCE)
        self._blocks_left = {}
        for unit in reductions:
            self._blocks_left[unit] = self._blocks_left.get(unit, 0) + 1
        super()._queue()
        self._waiting.sort()

    def _arrive(self, moment: int) -> None:
        waiting, gone = self._waiting, self._gone
        while gone < len(waiting) and waiting[gone][0] <= moment:
            ready, index = waiting[gone]
            cycle = (ready - self._ready[index]) // self._span
            self._stand((cycle, index))
            gone += 1
        self._gone = gone
        if not moment % 2:  # what a slot's end allows, and the next one's beginning
            self._go_until(self._now_s)

    def _stand(self, one: tuple[int, int]) -> None:
        """Let a message whose moment has come go when it is its turn, if it has what it carries."""
        if one in self._unmade:
            self._unmade.remove(one)
            self._unmade.add((one[0], ~one[1]))
            return
        self._push(one)

    def _push(self, one: tuple[int, int]) -> None:
        self._standing[one[1]] += 1
        urgency = self._latest_s[one[1]] + one[0] * self._step_s
        heapq.heappush(self._heap, (urgency, *one))

    def _made(self, one: tuple[int, int]) -> None:
        """Note that what a gather carries will be there when the link is free."""
        if (one[0], ~one[1]) in self._unmade:
            self._unmade.remove((one[0], ~one[1]))
            self._push(one)
        self._unmade.discard(one)

    def _go_until(self, until_s: float) -> None:
        """Let messages go whenever the link is free, up to then."""
        while self._heap and self._link_s <= until_s:
            self._go()

    def _go(self) -> None:
        _, cycle, index = heapq.heappop(self._heap)
        self._standing[index] -= 1
        self._carry(index)
        self.order.append((cycle, index))
        message = self.plan.messages[index]
        if message.what is not What.REDUCE:
            return
        self._blocks_left[message.unit] -= 1
        if self.plan.whole_layers and self._blocks_left[message.unit]:
            return
        for follower in self._followers.get(index, ()):
            self._made((cycle, follower))

    def _await(self, index: int) -> None:
        while self._standing[index] and self._heap:
            self._go()
        super()._await(index)

    def _compute(self, work_s: float) -> None:
        while self._heap and self._link_s - self._now_s < work_s * self._slowdown:
            busy_s = max(self._link_s - self._now_s, 0.0)
            self._now_s += busy_s
            work_s -= busy_s / self._slowdown
            self._go()
        super()._compute(work_s)


def _is_of_first_forward(plan: Plan, message: Message) -> bool:
    if message.what is What.REGATHER:
        return plan.slots.is_forward(message.gate)
    return message.what is What.GATHER and plan.units[message.unit].sharding.is_freed


def _followers(plan: Plan) -> dict[int, list[int]]:
    """Return the gathers that a reduction makes possible: of its block, or the last one of all."""
    gathers: dict[int, list[int]] = {}
    for index, message in enumerate(plan.messages):
        if message.what is What.GATHER:
            gathers.setdefault(message.unit, []).append(index)
    return {
        index: [
            i
            for i in gathers.get(message.unit, ())
            if plan.whole_layers or plan.messages[i].block == message.block
        ]
        for index, message in enumerate(plan.messages)
        if message.what is What.REDUCE
    }

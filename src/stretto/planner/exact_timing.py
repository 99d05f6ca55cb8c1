"""Event-by-event simulation of a plan on a profile, for links with any number of lanes.

The rules are those of the executor of sharded runs:

- A slot is entered when the slot before it has run. It runs when the messages due at it are
  complete.
- A message is queued on its lane once its gate is reached, its data is ready, and all messages
  before it are queued. Each lane sends one message at a time.
- While a message is being sent, computation is slower by the profile's slowdown factor.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stretto.planner.check import ready_half_slot
from stretto.planner.plan import MessageKind, Plan, PlanMessage
from stretto.planner.profile import Profile

_TIME_TOLERANCE_S = 1e-12


class TimeInterval(NamedTuple):
    """Start and end in seconds, counted from the start of the step's backward."""

    start_s: float
    end_s: float


class CycleTiming(NamedTuple):
    """The times of one simulated cycle."""

    step_s: float
    slots: list[TimeInterval]
    messages: list[TimeInterval]
    """When each message was last sent, in the order of the plan."""


class ExactTiming:
    """A simulated run, advanced one cycle at a time."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan, self._slots = plan, plan.slots
        checkpoints = [unit.checkpoint for unit in plan.units]
        self._slot_seconds = profile.slot_seconds(checkpoints, barrier=plan.barrier)
        self._slowdown = profile.slowdown
        self._message_seconds = [profile.message_s(plan, m) for m in plan.messages]
        self._ready_half_slots = [ready_half_slot(plan, message) for message in plan.messages]
        self._reductions_by_unit = _reductions_by_unit(plan)
        self._required_reductions = [
            _required_reductions(plan, m, self._reductions_by_unit) for m in plan.messages
        ]
        self._messages_due: list[list[int]] = [[] for _ in range(self._slots.count)]
        for index, message in enumerate(plan.messages):
            self._messages_due[message.due].append(index)
        self._link = LinkLanes(profile.link.lanes, profile.link.lane_share)
        self._now_s, self._cycle, self._half_slot = 0.0, -1, 0
        self._num_outstanding = [0] * len(plan.messages)
        """For each message, how many instances are queued or being sent."""
        self._one_is_for_next_cycle = [
            m.what is MessageKind.UNSHARD_FOR_BACKWARD and self._slots.is_forward(m.gate)
            for m in plan.messages
        ]
        """For each message, whether one of these instances belongs to the next cycle."""
        self._start_s: dict[int, float] = {}
        self._last_intervals = [TimeInterval(0.0, 0.0)] * len(plan.messages)
        self._is_done = [True] * len(plan.messages)
        """For each reduction, whether its last instance is complete."""
        starts = (i for i, m in enumerate(plan.messages) if self._is_of_first_forward(m))
        self._waiting_messages: deque[tuple[int, int]] = deque()
        self._enqueue_cycle(starts)
        self._run_slots(range(self._slots.update + 1, self._slots.count))

    def _is_of_first_forward(self, message: PlanMessage) -> bool:
        if message.what is MessageKind.UNSHARD_FOR_BACKWARD:
            return self._slots.is_forward(message.gate)
        freed = self._plan.units[message.unit].sharding.shards_parameters
        return message.what is MessageKind.UNSHARD and freed

    def run_cycle(self) -> CycleTiming:
        """Run a backward, the update, and the forward of the next step."""
        self._cycle += 1
        self._enqueue_cycle(range(len(self._plan.messages)))
        cycle_start_s = self._now_s
        slot_times = self._run_slots(range(self._slots.count))
        return CycleTiming(
            self._now_s - cycle_start_s,
            _relative_to(cycle_start_s, slot_times),
            _relative_to(cycle_start_s, self._last_intervals),
        )

    def _enqueue_cycle(self, messages: Iterable[int]) -> None:
        for index in messages:
            self._waiting_messages.append((self._cycle, index))
            self._num_outstanding[index] += 1

    def _is_ready(self, cycle: int, index: int) -> bool:
        """Return whether a message's gate is reached and its data is ready."""
        if self._ready_half_slots[index] + 2 * self._slots.count * cycle > self._half_slot:
            return False
        return all(self._is_done[reduction] for reduction in self._required_reductions[index])

    def _run_slots(self, slots: Iterable[int]) -> list[TimeInterval]:
        slot_times: list[TimeInterval] = []
        for slot in slots:
            self._reach_half_slot(2 * slot)
            while any(
                self._num_outstanding[index] > self._one_is_for_next_cycle[index]
                for index in self._messages_due[slot]
            ):
                self._finish_next_message()
            start_s = self._now_s
            self._compute(self._slot_seconds[slot])
            slot_times.append(TimeInterval(start_s, self._now_s))
            self._reach_half_slot(2 * slot + 1)
        return slot_times

    def _reach_half_slot(self, half_slot: int) -> None:
        self._half_slot = half_slot + 2 * self._slots.count * self._cycle
        self._start_ready_messages()

    def _compute(self, compute_s: float) -> None:
        """Advance time, and the link with it, until ``compute_s`` seconds are computed."""
        while (next_end_in_s := self._link.next_end_in_s()) <= compute_s * self._slowdown:
            compute_s -= next_end_in_s / self._slowdown
            self._finish_next_message()
        if next_end_in_s < math.inf:
            compute_s *= self._slowdown
            self._link.advance(max(compute_s, 0.0))
        self._now_s += max(compute_s, 0.0)

    def _finish_next_message(self) -> None:
        """Advance time to the end of the next message, and start messages that waited for it."""
        self._now_s += self._link.next_end_in_s()
        for index in self._link.finish_next():
            self._num_outstanding[index] -= 1
            self._last_intervals[index] = TimeInterval(self._start_s.pop(index), self._now_s)
            self._is_done[index] = True
        self._start_ready_messages()

    def _start_ready_messages(self) -> None:
        while self._waiting_messages and self._is_ready(*self._waiting_messages[0]):
            _, index = self._waiting_messages.popleft()
            self._is_done[index] = False
            message = self._plan.messages[index]
            lane = (message.unit + message.block) % self._link.count
            self._link.enqueue(lane, index, self._message_seconds[index])
        for index in self._link.active_messages():
            self._start_s.setdefault(index, self._now_s)


def _relative_to(cycle_start_s: float, intervals: Sequence[TimeInterval]) -> list[TimeInterval]:
    return [
        TimeInterval(start_s - cycle_start_s, end_s - cycle_start_s) for start_s, end_s in intervals
    ]


def _reductions_by_unit(plan: Plan) -> dict[int, list[int]]:
    """Return the indices of the reductions of each unit."""
    found: dict[int, list[int]] = defaultdict(list)
    for index, message in enumerate(plan.messages):
        if message.what is MessageKind.REDUCE:
            found[message.unit].append(index)
    return found


def _required_reductions(
    plan: Plan, message: PlanMessage, reductions: dict[int, list[int]]
) -> list[int]:
    """Return the reductions that must complete before ``message`` has new data to send."""
    if message.what is not MessageKind.UNSHARD:
        return []
    unit_reductions = reductions[message.unit]
    return [
        i for i in unit_reductions if plan.whole_layers or plan.messages[i].block == message.block
    ]


class LinkLanes:
    """A link whose lanes each send one message at a time and share the bandwidth evenly.

    One lane alone reaches ``max_lane_share`` of the bandwidth.
    """

    def __init__(self, count: int, max_lane_share: float = 1.0) -> None:
        self.count, self._max_lane_share = count, max_lane_share
        self._queues: list[deque[list[float]]] = [deque() for _ in range(count)]

    def enqueue(self, lane: int, index: int, duration_s: float) -> None:
        """Queue message ``index``, which would take ``duration_s`` seconds alone."""
        self._queues[lane].append([index, duration_s])

    def active_messages(self) -> list[int]:
        """Return the message that each busy lane is sending."""
        return [int(queue[0][0]) for queue in self._queues if queue]

    def next_end_in_s(self) -> float:
        """Return the seconds until the next message ends, if nothing is queued before."""
        heads = [queue[0][1] for queue in self._queues if queue]
        return min(heads) / self._lane_rate_share(len(heads)) if heads else math.inf

    def _lane_rate_share(self, busy: int) -> float:
        """Return the share of the bandwidth of each of ``busy`` lanes."""
        return min(1 / busy, self._max_lane_share)

    def advance(self, elapsed_s: float) -> None:
        """Send for ``elapsed_s`` seconds, fewer than `next_end_in_s`."""
        busy = [queue for queue in self._queues if queue]
        for queue in busy:
            queue[0][1] -= elapsed_s * self._lane_rate_share(len(busy))

    def finish_next(self) -> list[int]:
        """Send until the next message ends; return the messages that end then."""
        busy = [queue for queue in self._queues if queue]
        next_end_s = min(queue[0][1] for queue in busy)
        ending = [queue for queue in busy if queue[0][1] <= next_end_s + _TIME_TOLERANCE_S]
        self.advance(next_end_s / self._lane_rate_share(len(busy)))
        return [int(queue.popleft()[0]) for queue in ending]

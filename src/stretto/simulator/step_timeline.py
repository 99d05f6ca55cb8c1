"""Simulate training steps: the steady-state period of computation and overlapping messages.

A period is the steps from one communication round to the next. The seconds that a rank has computed
since the period began are its position on the compute timeline; waiting does not count. Each
exchange is issued at one position. The rank passes a later position, where the exchange is due,
only once the message has arrived. Strategies differ in these two positions. For example, gradients
are due before the update. A gossip segment is due before the forward that uses it, or some rounds
later.

The event engine (`stretto.simulator.event_engine`) runs every simulated rank through several
periods. A message starts once both ends have reached its issue position and the earlier messages on
their lanes are done. It shares links and cores with all other messages. A one-sided message starts
when its source is ready, and only the source waits for it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stretto.simulator.event_engine import run
from stretto.simulator.tasks import Job, tasks_of


@dataclass(frozen=True, slots=True)
class Exchange:
    """The messages of all ranks for one bucket, segment or fragment, in each period."""

    num_bytes: float
    """Size of one message; for an all-reduce, the size of the tensor."""
    issue_s: float
    """Position where it is issued, in seconds of computation since the period began."""
    due_s: float
    """Position where ranks wait for it; at least ``issue_s``, and perhaps in a later period."""
    lane: int = 0
    """Exchanges of one lane run one after another."""
    number: int = 0
    """Number of the segment, for topologies that draw peers for each segment."""
    inside: bool = False
    """Whether it goes around the members of a group instead of to peers."""
    hops: int = 1
    """Consecutive messages in it; each adds the latency of its link."""
    follows: int | None = None
    """Index in the period of the exchange that has to arrive before this one is issued."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The computation and exchanges of one period, on every rank."""

    compute_s: float
    """Seconds of computation of a rank in the period."""
    exchanges: tuple[Exchange, ...] = ()
    """In the order in which they are issued."""
    steps: int = 1
    """Training steps in the period."""
    slowdown: float = 1.0
    """The factor by which computation is slower while messages are in flight."""

    @property
    def lag(self) -> int:
        """Return the largest number of periods that a message may be in flight."""
        longest_s = max((e.due_s - e.issue_s for e in self.exchanges), default=0.0)
        return round(longest_s / self.compute_s) if self.compute_s else 0


_MEASURED_PERIODS = 8
"""Periods that are measured, at least; rounded up to whole cycles of the peers."""
_WARMUP_PERIODS = 4
"""Periods before the measured ones, besides those that a message may be in flight."""
_DIGITS = 9
"""Positions are rounded to this many decimal digits of a period."""
_SLOWDOWN_ITERATIONS = 3
"""How often the period is found again with the slowdown that the last result implies."""


@dataclass(frozen=True, slots=True)
class MessageFlow:
    """One message between two simulated ranks."""

    source: int
    target: int
    work_s: float
    """Seconds of transfer at full speed."""
    delay_s: float = 0.0
    """Latency before the transfer."""
    uses: Mapping[str, float] = field(default_factory=dict)
    """The share of each resource, by name, that the transfer takes at full speed."""
    arrival_delay_s: float = 0.0
    """Seconds from the end of its work to its arrival."""
    is_one_sided: bool = False
    """Whether it starts when the source is ready, and the target does not wait for it."""


class TrafficModel(NamedTuple):
    """The messages that exchanges cause between the simulated ranks."""

    ranks: int
    """Number of simulated ranks."""
    flows: Callable[[int, Exchange], Sequence[MessageFlow]]
    """From the number of a period and an exchange to the messages."""
    cycle_periods: int = 1
    """Periods after which the peers repeat; for random peers, a number that is enough."""
    hosts: int = 1
    """Number of simulated hosts."""
    max_ahead: int | None = None
    """Largest lead of a rank over the slowest, in periods; None: only messages limit it."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The steady state of a simulated training run."""

    period_s: float
    """Seconds of one period."""
    busy_s: Mapping[str, float]
    """Mean seconds at full capacity that each resource works in a period."""


def find_steady_state(step_timeline: StepTimeline, traffic: TrafficModel) -> SteadyState:
    """Return the period of ``step_timeline`` under ``traffic`` once all periods are alike.

    The period is at least the busy time of every resource. Where messages may be very late, ranks
    would wait for them only after many periods; the bound avoids simulating those.
    """
    found = _steady_state(step_timeline, traffic)
    for _ in range(_SLOWDOWN_ITERATIONS if step_timeline.slowdown > 1 else 0):
        share = min(1.0, max(found.busy_s.values(), default=0.0) / found.period_s)
        found = _steady_state(
            _slow_down(step_timeline, 1 + (step_timeline.slowdown - 1) * share), traffic
        )
    return found


def _steady_state(step_timeline: StepTimeline, traffic: TrafficModel) -> SteadyState:
    measured = traffic.cycle_periods * -(-_MEASURED_PERIODS // traffic.cycle_periods)
    warmup = _WARMUP_PERIODS + 2 * step_timeline.lag
    jobs, ends = _JobBuilder(step_timeline, traffic).build(warmup + measured)
    end_s = run(tasks_of(jobs)).end_s
    first, last = (max(end_s[index] for index in ends[period]) for period in (warmup - 1, -1))
    busy_s: dict[str, float] = defaultdict(float)
    for job in jobs:
        for resource, share in job.uses.items():
            busy_s[resource] += job.work_s * share / (warmup + measured)
    period_s = max(float(last - first) / measured, step_timeline.compute_s, *busy_s.values())
    return SteadyState(period_s, busy_s)


def _slow_down(step_timeline: StepTimeline, factor: float) -> StepTimeline:
    exchanges = tuple(
        replace(e, issue_s=e.issue_s * factor, due_s=e.due_s * factor)
        for e in step_timeline.exchanges
    )
    return replace(step_timeline, compute_s=step_timeline.compute_s * factor, exchanges=exchanges)


class _TimelineEvent(NamedTuple):
    """A position where an exchange is issued or due, or a period ends; events sort by time.

    At one position, exchanges that are due come before those issued. An exchange that is due where
    it is issued comes after both.
    """

    offset: float
    """Position in periods since the start."""
    order: int
    """`_DUE`, `_ISSUE`, `_DUE_AT_ONCE` or `_PERIOD_END`."""
    period: int
    exchange_index: int
    """Index of the exchange; -1 for the end of a period."""


class _JobBuilder:
    """Turns a step timeline into jobs, event by event, for all ranks at once."""

    def __init__(self, step_timeline: StepTimeline, traffic: TrafficModel) -> None:
        self._step_timeline, self._traffic = step_timeline, traffic
        self._jobs: list[Job] = []
        ranks = range(traffic.ranks)
        self._next_waits_for: list[list[int]] = [[] for _ in ranks]
        """The jobs that each rank's next job waits for: its last computation, and what is due."""
        self._lanes: dict[tuple[int, int], list[int]] = {}
        """The last messages of each (rank, lane)."""
        self._arrivals: dict[tuple[int, int], dict[int, list[int]]] = {}
        """The arrivals of each (period, exchange index), by rank."""

    def build(self, periods: int) -> tuple[list[Job], list[list[int]]]:
        """Return the jobs, and for each period the last computation of every rank."""
        done, ends = 0.0, list[list[int]]()
        for event in sorted(self._events(periods)):
            if event.offset > done or event.exchange_index < 0:
                self._compute((event.offset - done) * self._step_timeline.compute_s)
                done = event.offset
            if event.exchange_index < 0:
                ends.append([waits[0] for waits in self._next_waits_for])
                self._limit_lead(ends)
            elif event.order == _ISSUE:
                self._issue(event.period, event.exchange_index)
            else:
                for rank, arrived in self._arrivals[event.period, event.exchange_index].items():
                    self._next_waits_for[rank] += arrived
        return self._jobs, ends

    def _limit_lead(self, ends: list[list[int]]) -> None:
        """Make all ranks wait until the slowest is at most `max_ahead` periods behind."""
        ahead = self._traffic.max_ahead
        if ahead is not None and len(ends) >= ahead:
            lane = f"barrier {len(self._jobs)}"
            barrier = self._add(Job("barrier", 0, lane, 0.0, after=tuple(ends[-ahead])))
            for waits in self._next_waits_for:
                waits.append(barrier)

    def _events(self, periods: int) -> list[_TimelineEvent]:
        compute_s = self._step_timeline.compute_s or 1.0
        found = [_TimelineEvent(float(p + 1), _PERIOD_END, p, -1) for p in range(periods)]
        for period in range(periods):
            for index, exchange in enumerate(self._step_timeline.exchanges):
                issue = round(period + exchange.issue_s / compute_s, _DIGITS)
                due = round(period + exchange.due_s / compute_s, _DIGITS)
                found.append(_TimelineEvent(issue, _ISSUE, period, index))
                if due <= periods:
                    at_once = _DUE_AT_ONCE if due == issue else _DUE
                    found.append(_TimelineEvent(due, at_once, period, index))
        return found

    def _add(self, job: Job) -> int:
        self._jobs.append(job)
        return len(self._jobs) - 1

    def _compute(self, work_s: float) -> None:
        """Add ``work_s`` seconds of computation on every rank, after the jobs it waits for."""
        for rank, waits in enumerate(self._next_waits_for):
            job = Job("compute", rank, "compute", work_s, after=tuple(waits))
            self._next_waits_for[rank] = [self._add(job)]

    def _issue(self, period: int, index: int) -> None:
        """Add the messages of the exchange ``index`` in ``period``."""
        exchange = self._step_timeline.exchanges[index]
        arrived: dict[int, list[int]] = defaultdict(list)
        sent: dict[int, list[int]] = defaultdict(list)
        for flow in self._traffic.flows(period, exchange):
            ends = {flow.source, flow.target}
            waiting = {flow.source} if flow.is_one_sided else ends
            waits = {job for rank in waiting for job in self._next_waits_for[rank]}
            waits |= {job for rank in ends for job in self._lanes.get((rank, exchange.lane), ())}
            if exchange.follows is not None:
                before = self._arrivals[period, exchange.follows]
                waits |= {job for rank in ends for job in before.get(rank, ())}
            message = self._add(
                Job(
                    "message",
                    flow.source,
                    f"message {len(self._jobs)}",
                    flow.work_s,
                    flow.delay_s,
                    flow.uses,
                    tuple(sorted(waits)),
                )
            )
            arrival = message
            if flow.arrival_delay_s:
                lane = f"arrival {len(self._jobs)}"
                arrival = self._add(
                    Job("arrival", flow.source, lane, 0.0, flow.arrival_delay_s, after=(message,))
                )
            for rank in waiting:
                arrived[rank].append(arrival)
            for rank in ends:
                sent[rank].append(message)
                if flow.is_one_sided:  # a rank answers even those of one period one after another
                    self._lanes[rank, exchange.lane] = [message]
        for rank, messages in sent.items():
            self._lanes[rank, exchange.lane] = messages
        self._arrivals[period, index] = arrived


_DUE, _ISSUE, _DUE_AT_ONCE, _PERIOD_END = range(4)

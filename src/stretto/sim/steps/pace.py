"""How long a period takes once all are alike: computation and messages, event by event.

Every rank that is laid out has its line (`stretto.sim.steps.rhythm`); the event engine says when
each stretch of it runs. A message begins when both its ends have come to where it leaves, and those
before it on their lanes are over; it shares links and cores with all others (`stretto.sim.engine`).
Of a visit, one end alone decides when it begins, and waits for it; the other answers at any time.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stretto.sim.engine import run
from stretto.sim.steps.rhythm import Exchange, Rhythm
from stretto.sim.tasks import Job, tasks_of

_MEASURED = 8
"""Periods that are looked at, at least; as many as it takes for rounds to repeat."""
_WARM = 4
"""Periods before them, and those that a message may be under way."""
_DIGITS = 9
"""Places of the line that differ by less than this many digits of a period are one."""
_TURNS = 3
"""How often the pace is found again with computation as slow as messages of that pace make it."""


@dataclass(frozen=True, slots=True)
class Flow:
    """One message between two ranks that are laid out."""

    source: int
    target: int
    work_s: float
    delay_s: float = 0.0
    uses: Mapping[str, float] = field(default_factory=dict)
    after_s: float = 0.0
    """How much later than its work ends it has arrived."""
    visit: bool = False
    """Whether the target has no part in when it begins, and does not wait for it."""


class Carriage(NamedTuple):
    """Whom the exchanges of a rhythm reach, and by what messages."""

    ranks: int
    """That are laid out."""
    flows: Callable[[int, Exchange], Sequence[Flow]]
    """The messages of one exchange in the period of a number."""
    repeats: int = 1
    """Periods after which peers are the same again, or that are enough where they never are."""
    hosts: int = 1
    """That are laid out."""
    most_ahead: int | None = None
    """Periods by which nobody is further ahead than the slowest; None: only messages hold up."""


@dataclass(frozen=True, slots=True)
class Paced:
    """A period that is like the one before it."""

    period_s: float
    busy_s: Mapping[str, float]
    """How long each resource works at full capacity in a period, in the mean."""


def find_pace(rhythm: Rhythm, carriage: Carriage) -> Paced:
    """Return the pace of a rhythm that has long begun.

    No resource works longer in a period than there is: where messages may be late by much, it takes
    many periods until somebody waits for them, and the limit is known before.
    """
    found = _paced(rhythm, carriage)
    for _ in range(_TURNS if rhythm.slowdown > 1 else 0):
        share = min(1.0, max(found.busy_s.values(), default=0.0) / found.period_s)
        found = _paced(_stretched(rhythm, 1 + (rhythm.slowdown - 1) * share), carriage)
    return found


def _paced(rhythm: Rhythm, carriage: Carriage) -> Paced:
    measured = carriage.repeats * -(-_MEASURED // carriage.repeats)
    warm = _WARM + 2 * rhythm.lag
    jobs, ends = _Layout(rhythm, carriage).lay_out(warm + measured)
    ran = run(tasks_of(jobs)).end_s
    first, last = (max(ran[index] for index in ends[period]) for period in (warm - 1, -1))
    busy_s: dict[str, float] = defaultdict(float)
    for job in jobs:
        for resource, share in job.uses.items():
            busy_s[resource] += job.work_s * share / (warm + measured)
    period_s = max(float(last - first) / measured, rhythm.compute_s, *busy_s.values())
    return Paced(period_s, busy_s)


def _stretched(rhythm: Rhythm, longer: float) -> Rhythm:
    exchanges = tuple(
        replace(e, leaves_s=e.leaves_s * longer, due_s=e.due_s * longer) for e in rhythm.exchanges
    )
    return replace(rhythm, compute_s=rhythm.compute_s * longer, exchanges=exchanges)


class _Moment(NamedTuple):
    """A place of the line at which something happens; what is due comes before what leaves.

    Only what is due where it leaves comes after that.
    """

    at: float
    turn: int
    period: int
    which: int
    """Of the exchange; the end of the period where there is none."""


class _Layout:
    """Turns a rhythm into jobs, all ranks place by place."""

    def __init__(self, rhythm: Rhythm, carriage: Carriage) -> None:
        self._rhythm, self._carriage = rhythm, carriage
        self._jobs: list[Job] = []
        ranks = range(carriage.ranks)
        self._computed: list[list[int]] = [[] for _ in ranks]
        """What a rank's next job comes after: its last stretch, and what is due now."""
        self._lanes: dict[tuple[int, int], list[int]] = {}
        """The last messages of each rank and lane."""
        self._arrivals: dict[tuple[int, int], dict[int, list[int]]] = {}
        """By period and exchange, of each rank."""

    def lay_out(self, periods: int) -> tuple[list[Job], list[list[int]]]:
        """Return the jobs, and for each period those with which it ends."""
        done, ends = 0.0, list[list[int]]()
        for moment in sorted(self._moments(periods)):
            if moment.at > done or moment.which < 0:
                self._compute((moment.at - done) * self._rhythm.compute_s)
                done = moment.at
            if moment.which < 0:
                ends.append([waits[0] for waits in self._computed])
                self._hold_back(ends)
            elif moment.turn == _LEAVES:
                self._leave(moment.period, moment.which)
            else:
                for rank, arrived in self._arrivals[moment.period, moment.which].items():
                    self._computed[rank] += arrived
        return self._jobs, ends

    def _hold_back(self, ends: list[list[int]]) -> None:
        """Let no rank go on before all have ended the period that is as far back as they may be."""
        ahead = self._carriage.most_ahead
        if ahead is not None and len(ends) >= ahead:
            number = len(self._jobs)
            all_there = self._add(Job("meet", 0, f"meet {number}", 0.0, after=tuple(ends[-ahead])))
            for waits in self._computed:
                waits.append(all_there)

    def _moments(self, periods: int) -> list[_Moment]:
        compute_s = self._rhythm.compute_s or 1.0
        found = [_Moment(float(p + 1), _ENDS, p, -1) for p in range(periods)]
        for period in range(periods):
            for index, exchange in enumerate(self._rhythm.exchanges):
                leaves = round(period + exchange.leaves_s / compute_s, _DIGITS)
                due = round(period + exchange.due_s / compute_s, _DIGITS)
                found.append(_Moment(leaves, _LEAVES, period, index))
                if due <= periods:
                    at_once = _DUE_AT_ONCE if due == leaves else _DUE
                    found.append(_Moment(due, at_once, period, index))
        return found

    def _add(self, job: Job) -> int:
        self._jobs.append(job)
        return len(self._jobs) - 1

    def _compute(self, work_s: float) -> None:
        """Let every rank compute so much, once all that it waits for is there."""
        for rank, waits in enumerate(self._computed):
            job = Job("compute", rank, "compute", work_s, after=tuple(waits))
            self._computed[rank] = [self._add(job)]

    def _leave(self, period: int, index: int) -> None:
        exchange = self._rhythm.exchanges[index]
        arrived: dict[int, list[int]] = defaultdict(list)
        sent: dict[int, list[int]] = defaultdict(list)
        for flow in self._carriage.flows(period, exchange):
            ends = {flow.source, flow.target}
            waiting = {flow.source} if flow.visit else ends
            waits = {job for rank in waiting for job in self._computed[rank]}
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
            over = message
            if flow.after_s:
                lane = f"arrival {len(self._jobs)}"
                over = self._add(
                    Job("arrival", flow.source, lane, 0.0, flow.after_s, after=(message,))
                )
            for rank in waiting:
                arrived[rank].append(over)
            for rank in ends:
                sent[rank].append(message)
                if flow.visit:  # also those of one period are answered one after another
                    self._lanes[rank, exchange.lane] = [message]
        for rank, messages in sent.items():
            self._lanes[rank, exchange.lane] = messages
        self._arrivals[period, index] = arrived


_DUE, _LEAVES, _DUE_AT_ONCE, _ENDS = range(4)

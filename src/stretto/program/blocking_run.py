"""Run a step program on all ranks with messages that block, to find ranks that wait for ever.

Every rank has a main thread, queues and lanes. The main thread goes through the moments of its
steps; at a moment it waits for what is due and opens gates. A queue starts its operations in the
order of the program: one that is at its head starts once its gate is open and the operation that it
follows has been applied. A lane takes its operations one after another. An operation ends on a rank
when it is at the head of all its lanes there and has come as far on every partner: a message is
taken only when both ends are ready.

Nothing here depends on time. If some rank does not reach the end, no timing could make it.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from stretto.program.messages import lanes_of, partners_of
from stretto.program.step_program import (
    ALL,
    Applied,
    Group,
    Kind,
    Moment,
    Operation,
    Payload,
    Phase,
    Source,
    StepProgram,
    WhenSkipped,
)

_CONSOLIDATION_LANE = 0
_CONSOLIDATION = -1
"""Index of the all-reduce with which a consolidation ends."""
_NO_LANE = -2
"""The lane of operations without messages."""
Key = tuple[int, int]
"""Step and index of an operation."""
Skips = frozenset[tuple[int, int]]
"""(step, rank): the rank skips the step, because its loss is not finite."""


@dataclass(slots=True)
class _Rank:
    """The state of one rank."""

    number: int
    skips: frozenset[int]
    event: int = 0
    queues: dict[int, deque[Key]] = field(default_factory=lambda: defaultdict(deque))
    lanes: dict[int, deque[Key]] = field(default_factory=lambda: defaultdict(deque))
    open: set[Key] = field(default_factory=set)
    started: set[Key] = field(default_factory=set)
    ended: set[Key] = field(default_factory=set)
    applied: set[Key] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Event:
    """What the main thread does at one place: it waits for keys, then opens gates."""

    moment: str
    waits: tuple[Key, ...] = ()
    opens: tuple[Key, ...] = ()
    consolidates: int | None = None


class _Run:
    """All ranks of one run."""

    def __init__(self, program: StepProgram, skips: Skips, consolidated: int | None) -> None:
        self.program, self.size = program, program.mesh.size
        self.operations: dict[Key, Operation] = {}
        self.ranks = [
            _Rank(rank, frozenset(step for step, who in skips if who == rank))
            for rank in range(self.size)
        ]
        steps = program.steps(2)
        for step in steps:
            for index, operation in enumerate(program.leaving(step)):
                self.operations[step, index] = operation
        self.events = _events(program, steps, self.operations, consolidated)
        self.lanes = {
            key: lanes_of(one, self.size) or (_NO_LANE,) for key, one in self.operations.items()
        }
        self._partners: dict[tuple[Key, int], frozenset[int]] = {}
        for rank in self.ranks:
            for key, operation in self.operations.items():
                if key[1] != _CONSOLIDATION and self.takes_part(rank, key):
                    rank.queues[operation.queue].append(key)

    def takes_part(self, rank: _Rank, key: Key) -> bool:
        """Return whether ``rank`` starts an operation at all: some stay in a skipped step."""
        stays = self.operations[key].when_skipped is WhenSkipped.SKIP
        return not (stays and key[0] in rank.skips)

    def partners(self, key: Key, rank: int) -> frozenset[int]:
        """Return the ranks that ``rank`` needs to end an operation."""
        if (key, rank) not in self._partners:
            self._partners[key, rank] = frozenset(
                set(range(self.size)) - {rank}
                if key[1] == _CONSOLIDATION
                else partners_of(self.operations[key], rank, self.size)
            )
        return self._partners[key, rank]

    def is_ready(self, rank: _Rank, key: Key) -> bool:
        """Return whether an operation has ended on ``rank``, or is at the head of its lanes."""
        if key in rank.ended:
            return True
        if key not in rank.started:
            return False
        return all(rank.lanes[lane][0] == key for lane in self.lanes[key])

    def advance(self, rank: _Rank) -> bool:
        """Let queues, lanes and the main thread of ``rank`` go on; return whether one did."""
        return any([self._start(rank), self._end(rank), self._go_on(rank)])

    def _start(self, rank: _Rank) -> bool:
        moved = False
        for waiting in rank.queues.values():
            while waiting and self._can_start(rank, waiting[0]):
                key = waiting.popleft()
                self._begin(rank, key)
                moved = True
        return moved

    def _begin(self, rank: _Rank, key: Key) -> None:
        rank.started.add(key)
        for lane in self.lanes[key]:
            rank.lanes[lane].append(key)

    def _can_start(self, rank: _Rank, key: Key) -> bool:
        if key not in rank.open:
            return False
        operation = self.operations[key]
        if operation.clears and any(
            not self.operations[other].clears and other not in rank.ended for other in rank.started
        ):
            return False
        if operation.after is None:
            return True
        before = (key[0], operation.after)
        is_applied_itself = self.operations[before].applied is Applied.ARRIVAL
        return before in (rank.applied if is_applied_itself else rank.ended)

    def _end(self, rank: _Rank) -> bool:
        moved = False
        for lane in list(rank.lanes.values()):
            if not lane:
                continue
            key = lane[0]
            partners = self.partners(key, rank.number)
            if self.is_ready(rank, key) and all(
                self.is_ready(self.ranks[partner], key) for partner in partners
            ):
                for used in self.lanes[key]:
                    rank.lanes[used].popleft()
                rank.ended.add(key)
                if self.operations[key].applied is Applied.ARRIVAL:
                    rank.applied.add(key)
                moved = True
        return moved

    def _go_on(self, rank: _Rank) -> bool:
        moved = False
        while rank.event < len(self.events):
            event = self.events[rank.event]
            if not all(key in rank.ended or not self.takes_part(rank, key) for key in event.waits):
                return moved
            rank.open.update(event.opens)
            step = event.consolidates
            if step is not None and (step, _CONSOLIDATION) not in rank.ended:
                return self._join_consolidation(rank, step) or moved
            rank.event += 1
            moved = True
        return moved

    def _join_consolidation(self, rank: _Rank, step: int) -> bool:
        """Take part in the all-reduce once all that may start has ended; return whether it did."""
        key = (step, _CONSOLIDATION)
        may_start = any(waiting and waiting[0] in rank.open for waiting in rank.queues.values())
        if may_start or key in rank.started or not rank.started <= rank.ended:
            return False
        self._begin(rank, key)
        return True


def _events(
    program: StepProgram,
    steps: range,
    operations: dict[Key, Operation],
    consolidated: int | None,
) -> list[_Event]:
    """Return what the main thread of every rank does, in order."""
    per_step = len(program.moments)
    waits: dict[tuple[int, bool], list[Key]] = defaultdict(list)
    opens: dict[int, list[Key]] = defaultdict(list)
    for key, operation in operations.items():
        due = program.position(key[0], operation.due)
        waits[due, due // per_step > key[0]].append(key)
        opens[program.position(key[0], operation.gate)].append(key)
    found: list[_Event] = []
    for step in steps:
        for in_step, moment in enumerate(program.moments):
            position, name = step * per_step + in_step, f"{moment} of step {step}"
            found.append(_Event(name, tuple(waits[position, True]), tuple(opens[position])))
            found.append(_Event(name, tuple(waits[position, False])))
            if moment.phase is Phase.END and step == consolidated:
                found.append(_Event(f"consolidation after step {step}", consolidates=step))
                operations[step, _CONSOLIDATION] = _consolidation()
    return [
        event for event in found if event.waits or event.opens or event.consolidates is not None
    ]


def _consolidation() -> Operation:
    end = Moment(Phase.END)
    payload = Payload(1, 8)
    return Operation(
        Kind.ALL_REDUCE,
        Source.PARAMETER,
        ALL,
        Group.WORLD,
        payload,
        None,
        end,
        end,
        _CONSOLIDATION_LANE,
    )


def find_deadlock(
    program: StepProgram,
    skips: Skips = frozenset(),
    consolidated: int | None = None,
) -> str | None:
    """Run two periods of ``program``; return where ranks wait for ever, or None if they do not.

    Args:
        program: The program of all ranks.
        skips: Which rank skips which step.
        consolidated: All ranks consolidate their models after this step.
    """
    run = _Run(program, skips, consolidated)
    while any(run.advance(rank) for rank in run.ranks):
        pass
    stuck = [rank for rank in run.ranks if rank.event < len(run.events)]
    return _describe(run, stuck[0]) if stuck else None


def _describe(run: _Run, rank: _Rank) -> str:
    event = run.events[rank.event]
    keys = [key for key in event.waits if key not in rank.ended] or [
        key for lane in rank.lanes.values() for key in list(lane)[:1]
    ]
    if not keys:
        return f"rank {rank.number} waits for ever at {event.moment}"
    key = keys[0]
    operation = run.operations[key]
    what = f"{operation} ({operation.gate} -> {operation.due}, step {key[0]})"
    if key in rank.started:
        others = [p for p in run.partners(key, rank.number) if not run.is_ready(run.ranks[p], key)]
        why = f"it waits for rank {others[0]}" if others else "another is before it on its lane"
    elif key not in rank.open:
        why = "its gate has not come"
    else:
        why = "another is before it in its queue, or it follows one that has not been applied"
    return f"rank {rank.number} waits for ever at {event.moment} for the {what}: {why}"

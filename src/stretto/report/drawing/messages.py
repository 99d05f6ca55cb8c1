"""The messages of a schedule on one clock: the step of each, counted from what it waits for."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from stretto.comm.schedule import Action, Op, Round, Schedule, rounds
from stretto.errors import ConfigError, ScheduleError

Place = tuple[int, int]
"""A round: its rank, and where it stands in that rank's list."""


@dataclass(frozen=True, slots=True)
class Message:
    """Chunks on their way from one rank to another."""

    step: int
    """1 + the largest step of what either end waits for: messages of a step may travel at once."""
    source: int
    target: int
    start: int
    stop: int
    action: Action
    """What the target does with them: add or copy."""
    lane: int

    @property
    def num_chunks(self) -> int:
        """Return how many chunks it carries."""
        return self.stop - self.start


def messages(schedule: Schedule, most: int) -> tuple[Message, ...]:
    """Return the messages of ``schedule``, ordered by step, lane, source and target.

    A rank waits as it does when it runs: a lane takes its rounds one after another, and a round
    begins when those it waits for have ended.

    Raises:
        ConfigError: More than ``most`` messages.
        ScheduleError: An end without its other end, or ranks that wait in a circle.
    """
    cut = _rounds(schedule, most)
    links = _links(schedule, cut)
    steps = _Clock(cut, links).run()
    if len(steps) < len(links):
        raise ScheduleError(f"{_named(schedule)}: ranks wait for each other in a circle")
    found = (_message(links[index], step) for index, step in steps.items())
    return tuple(sorted(found, key=lambda m: (m.step, m.lane, m.source, m.target, m.start)))


@dataclass(frozen=True, slots=True)
class _Link:
    """Both ends of one message."""

    source: Place
    target: Place
    send: Op
    receive: Op


def _rounds(schedule: Schedule, most: int) -> list[tuple[Round, ...]]:
    cut: list[tuple[Round, ...]] = []
    ends = 0
    for rank in range(schedule.size):
        cut.append(rounds(schedule, rank))
        ends += sum(len(batch.ops) for batch in cut[-1])
        if ends > 2 * most:
            raise ConfigError(
                f"{_named(schedule)} is more than {most:,} messages, too many to list; "
                "take fewer ranks or parts"
            )
    return cut


def _links(schedule: Schedule, cut: list[tuple[Round, ...]]) -> list[_Link]:
    """Join the k-th send of a route (source, target, lane) with its k-th receive."""
    sends: dict[tuple[int, int, int], list[tuple[Place, Op]]] = defaultdict(list)
    receives: dict[tuple[int, int, int], list[tuple[Place, Op]]] = defaultdict(list)
    for place, op in _ops(cut):
        if op.action is Action.SEND:
            sends[place[0], op.peer, op.lane].append((place, op))
        else:
            receives[op.peer, place[0], op.lane].append((place, op))
    links: list[_Link] = []
    for route in sends.keys() | receives.keys():
        there, here = sends[route], receives[route]
        ranges = [[(op.start, op.stop) for _, op in ends] for ends in (there, here)]
        if ranges[0] != ranges[1]:
            raise ScheduleError(
                f"{_named(schedule)}: what rank {route[0]} sends on lane {route[2]} is not what "
                f"rank {route[1]} expects"
            )
        links += [_Link(*places, *ops) for places, ops in map(_crossed, there, here)]
    return links


def _crossed(
    send: tuple[Place, Op], receive: tuple[Place, Op]
) -> tuple[tuple[Place, Place], tuple[Op, Op]]:
    return (send[0], receive[0]), (send[1], receive[1])


def _ops(cut: list[tuple[Round, ...]]) -> Iterator[tuple[Place, Op]]:
    for rank, batches in enumerate(cut):
        for index, batch in enumerate(batches):
            for op in batch.ops:
                yield (rank, index), op


class _Clock:
    """Steps as far as they are known: a message has one once both its rounds have begun."""

    def __init__(self, cut: list[tuple[Round, ...]], links: list[_Link]) -> None:
        self._links = links
        self._carries: dict[Place, list[int]] = defaultdict(list)
        for index, link in enumerate(links):
            self._carries[link.source].append(index)
            self._carries[link.target].append(index)
        self._waits = _waits(cut)
        self._awaited_by: dict[Place, list[Place]] = defaultdict(list)
        for place, needed in self._waits.items():
            for other in needed:
                self._awaited_by[other].append(place)
        self._missing = {place: len(needed) for place, needed in self._waits.items()}
        self._begun: dict[Place, int] = {}
        self._steps: dict[int, int] = {}
        self._travelling = {place: len(carried) for place, carried in self._carries.items()}

    def run(self) -> dict[int, int]:
        """Return the step of each link, by index; those that wait in a circle have none."""
        ready = [place for place, missing in self._missing.items() if not missing]
        while ready:
            place = ready.pop()
            self._begun[place] = 1 + max(map(self._end, self._waits[place]), default=0)
            for ended in self._meet(place):
                for follower in self._awaited_by[ended]:
                    self._missing[follower] -= 1
                    if not self._missing[follower]:
                        ready.append(follower)
        return self._steps

    def _meet(self, place: Place) -> Iterator[Place]:
        """Give a step to each message of ``place`` whose other end has begun; yield what ended."""
        for index in self._carries[place]:
            both = (self._links[index].source, self._links[index].target)
            if all(end in self._begun for end in both):
                self._steps[index] = max(self._begun[end] for end in both)
                for end in both:
                    self._travelling[end] -= 1
                    if not self._travelling[end]:
                        yield end

    def _end(self, place: Place) -> int:
        return max(self._steps[index] for index in self._carries[place])


def _waits(cut: list[tuple[Round, ...]]) -> dict[Place, set[Place]]:
    """Return the rounds that each round follows: the one before it on its lane, and its waits."""
    waits: dict[Place, set[Place]] = {}
    for rank, batches in enumerate(cut):
        latest: dict[int, Place] = {}
        for index, batch in enumerate(batches):
            needed = {(rank, other) for other in batch.waits}
            if batch.lane in latest:
                needed.add(latest[batch.lane])
            waits[rank, index] = needed
            latest[batch.lane] = (rank, index)
    return waits


def _message(link: _Link, step: int) -> Message:
    op = link.receive
    return Message(step, link.source[0], link.target[0], op.start, op.stop, op.action, op.lane)


def _named(schedule: Schedule) -> str:
    return f"{schedule.name} for {schedule.size} ranks"

"""List the messages of a schedule, each with the logical step at which it can be sent."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from stretto.collectives.schedule import Action, Op, Round, Schedule, rounds
from stretto.errors import ConfigError, ScheduleError

RoundKey = tuple[int, int]
"""A round: (rank, index in that rank's list of rounds)."""


@dataclass(frozen=True, slots=True)
class ScheduleMessage:
    """A message from one rank to another, with the range of chunks it carries."""

    step: int
    """1 + the largest step that either end waits for; messages of one step are independent."""
    source: int
    target: int
    start: int
    stop: int
    action: Action
    """What the target does with the chunks: add or copy."""
    lane: int

    @property
    def num_chunks(self) -> int:
        """The number of chunks."""
        return self.stop - self.start


def messages(schedule: Schedule, most: int) -> tuple[ScheduleMessage, ...]:
    """Return the messages of ``schedule``, ordered by step, lane, source and target.

    The rules are those of execution: each lane runs its rounds one after another, and a round
    starts when the rounds that it waits for have ended.

    Raises:
        ConfigError: There are more than ``most`` messages.
        ScheduleError: A send has no matching receive, or the ranks deadlock.
    """
    rounds_by_rank = _rounds(schedule, most)
    links = _links(schedule, rounds_by_rank)
    steps = _StepCounter(rounds_by_rank, links).run()
    if len(steps) < len(links):
        raise ScheduleError(f"{_schedule_title(schedule)}: ranks wait for each other in a circle")
    found = (_message(links[index], step) for index, step in steps.items())
    return tuple(sorted(found, key=lambda m: (m.step, m.lane, m.source, m.target, m.start)))


@dataclass(frozen=True, slots=True)
class _MessageEnds:
    """The send and the receive of one message, with their rounds."""

    source: RoundKey
    target: RoundKey
    send: Op
    receive: Op


def _rounds(schedule: Schedule, most: int) -> list[tuple[Round, ...]]:
    rounds_by_rank: list[tuple[Round, ...]] = []
    ends = 0
    for rank in range(schedule.size):
        rounds_by_rank.append(rounds(schedule, rank))
        ends += sum(len(one_round.ops) for one_round in rounds_by_rank[-1])
        if ends > 2 * most:
            raise ConfigError(
                f"{_schedule_title(schedule)} has more than {most:,} messages, too many to list; "
                "use fewer ranks or parts"
            )
    return rounds_by_rank


def _links(schedule: Schedule, rounds_by_rank: list[tuple[Round, ...]]) -> list[_MessageEnds]:
    """Match the k-th send of each route (source, target, lane) with its k-th receive."""
    sends: dict[tuple[int, int, int], list[tuple[RoundKey, Op]]] = defaultdict(list)
    receives: dict[tuple[int, int, int], list[tuple[RoundKey, Op]]] = defaultdict(list)
    for round_key, op in _ops(rounds_by_rank):
        if op.action is Action.SEND:
            sends[round_key[0], op.peer, op.lane].append((round_key, op))
        else:
            receives[op.peer, round_key[0], op.lane].append((round_key, op))
    links: list[_MessageEnds] = []
    for route in sends.keys() | receives.keys():
        sent_ops, received_ops = sends[route], receives[route]
        ranges = [[(op.start, op.stop) for _, op in ends] for ends in (sent_ops, received_ops)]
        if ranges[0] != ranges[1]:
            raise ScheduleError(
                f"{_schedule_title(schedule)}: what rank {route[0]} sends on lane {route[2]} is "
                f"not what rank {route[1]} expects"
            )
        links += [
            _MessageEnds(*round_keys, *ops)
            for round_keys, ops in map(_pair_ends, sent_ops, received_ops)
        ]
    return links


def _pair_ends(
    send: tuple[RoundKey, Op], receive: tuple[RoundKey, Op]
) -> tuple[tuple[RoundKey, RoundKey], tuple[Op, Op]]:
    return (send[0], receive[0]), (send[1], receive[1])


def _ops(rounds_by_rank: list[tuple[Round, ...]]) -> Iterator[tuple[RoundKey, Op]]:
    for rank, rank_rounds in enumerate(rounds_by_rank):
        for index, one_round in enumerate(rank_rounds):
            for op in one_round.ops:
                yield (rank, index), op


class _StepCounter:
    """Computes the step of each message: known once the rounds of both its ends have started."""

    def __init__(self, rounds_by_rank: list[tuple[Round, ...]], links: list[_MessageEnds]) -> None:
        self._links = links
        self._carries: dict[RoundKey, list[int]] = defaultdict(list)
        for index, link in enumerate(links):
            self._carries[link.source].append(index)
            self._carries[link.target].append(index)
        self._waits = _waits(rounds_by_rank)
        self._awaited_by: dict[RoundKey, list[RoundKey]] = defaultdict(list)
        for round_key, needed in self._waits.items():
            for other in needed:
                self._awaited_by[other].append(round_key)
        self._num_missing = {round_key: len(needed) for round_key, needed in self._waits.items()}
        self._begun: dict[RoundKey, int] = {}
        self._steps: dict[int, int] = {}
        self._num_in_flight = {
            round_key: len(carried) for round_key, carried in self._carries.items()
        }

    def run(self) -> dict[int, int]:
        """Return the step of each link, by index; links in a deadlock have none."""
        ready = [round_key for round_key, missing in self._num_missing.items() if not missing]
        while ready:
            round_key = ready.pop()
            self._begun[round_key] = 1 + max(map(self._end, self._waits[round_key]), default=0)
            for ended in self._complete_messages(round_key):
                for follower in self._awaited_by[ended]:
                    self._num_missing[follower] -= 1
                    if not self._num_missing[follower]:
                        ready.append(follower)
        return self._steps

    def _complete_messages(self, round_key: RoundKey) -> Iterator[RoundKey]:
        """Set the step of messages of a round whose other end has started; yield ended rounds."""
        for index in self._carries[round_key]:
            both = (self._links[index].source, self._links[index].target)
            if all(end in self._begun for end in both):
                self._steps[index] = max(self._begun[end] for end in both)
                for end in both:
                    self._num_in_flight[end] -= 1
                    if not self._num_in_flight[end]:
                        yield end

    def _end(self, round_key: RoundKey) -> int:
        return max(self._steps[index] for index in self._carries[round_key])


def _waits(rounds_by_rank: list[tuple[Round, ...]]) -> dict[RoundKey, set[RoundKey]]:
    """Return the rounds that each round waits for, the one before it on its lane included."""
    waits_for: dict[RoundKey, set[RoundKey]] = {}
    for rank, rank_rounds in enumerate(rounds_by_rank):
        latest: dict[int, RoundKey] = {}
        for index, one_round in enumerate(rank_rounds):
            needed = {(rank, other) for other in one_round.waits_for}
            if one_round.lane in latest:
                needed.add(latest[one_round.lane])
            waits_for[rank, index] = needed
            latest[one_round.lane] = (rank, index)
    return waits_for


def _message(link: _MessageEnds, step: int) -> ScheduleMessage:
    op = link.receive
    return ScheduleMessage(
        step, link.source[0], link.target[0], op.start, op.stop, op.action, op.lane
    )


def _schedule_title(schedule: Schedule) -> str:
    return f"{schedule.name} for {schedule.size} ranks"

"""Verification refuses every schedule with one fault, whatever the fault and its position.

The faults are generated: every kind, at positions spread over the programs of all ranks. These
changes are no faults, and are left out on purpose:

- a copied message that is sent twice, at both ends, since it arrives twice with the same values;
- two additions of one lane in one round, since they are applied in program order;
- a redundant dependency. It is redundant if the operation does not use the chunks of the operation
  that it waits for, or if an earlier operation of its round waits as well. So a dependency is
  dropped only from the first operation of a round, and only if the two use the same chunks.
"""

from collections import defaultdict
from copy import copy
from dataclasses import replace

import pytest

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALLREDUCE, host_all_gather, host_reduce_scatter
from stretto.collectives.schedule import Action, rounds
from stretto.collectives.verify import verify_all_gather, verify_allreduce, verify_reduce_scatter
from stretto.errors import ScheduleError

SCHEDULES = {
    "ring": (Mesh((4,)), 1),
    "ring in parts": (Mesh((3,)), 2),
    "halving-doubling": (Mesh((8,)), 1),
    "halving-doubling folded": (Mesh((6,)), 1),
    "binary-blocks": (Mesh((7,)), 1),
    "double-tree": (Mesh((6,)), 1),
    "double-tree in parts": (Mesh((5,)), 2),
    "hierarchical": (Mesh((3, 2)), 1),
    "hierarchical in parts": (Mesh((2, 2)), 2),
    "masters": (Mesh((3, 2)), 1),
    "masters in parts": (Mesh((2, 2)), 2),
    "torus": (Mesh((6,)), 1),
    "host-reduce-scatter": (Mesh((2, 2, 2)), 1),
    "host-reduce-scatter in parts": (Mesh((3, 3)), 2),
    "host-all-gather": (Mesh((4, 4)), 1),
    "host-all-gather in parts": (Mesh((3, 3)), 2),
}
OTHERS = {
    "host-reduce-scatter": (host_reduce_scatter, verify_reduce_scatter),
    "host-all-gather": (host_all_gather, verify_all_gather),
}
"""Schedules that are not all-reduces, with their verification."""
POSITIONS = 4
"""How many positions of each fault are tried in each schedule, spread evenly."""


def schedule_of(name):
    mesh, parts = SCHEDULES[name]
    word = name.split(" ")[0]
    return OTHERS[word][0](mesh, parts) if word in OTHERS else ALLREDUCE[word](mesh, parts)


def verify(name, schedule):
    (mesh, _), word = SCHEDULES[name], name.split(" ")[0]
    if word in OTHERS:
        OTHERS[word][1](schedule, mesh.ranks_per_host[0])
    else:
        verify_allreduce(schedule)


class Draft:
    """The programs of all ranks, which can be changed, and the matching ends of messages."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.programs = [list(schedule.program(rank)) for rank in range(schedule.size)]
        sends, receives = defaultdict(list), defaultdict(list)
        for rank, index, op in self.positions():
            if op.action is Action.SEND:
                sends[rank, op.peer, op.lane].append((rank, index))
            else:
                receives[op.peer, rank, op.lane].append((rank, index))
        ends = [
            (s, r) for route in sends for s, r in zip(sends[route], receives[route], strict=True)
        ]
        self.other_end = dict(ends) | {r: s for s, r in ends}

    def copy(self):
        other = copy(self)
        other.programs = [list(program) for program in self.programs]
        return other

    def positions(self):
        for rank, program in enumerate(self.programs):
            for index, op in enumerate(program):
                yield rank, index, op

    def change(self, rank, index, **fields):
        self.programs[rank][index] = self.programs[rank][index]._replace(**fields)

    def drop(self, rank, index):
        """Remove an operation; operations that waited for it now wait for its dependencies."""
        program = self.programs[rank]
        dropped = program.pop(index)
        for position, op in enumerate(program):
            after = {i for i in op.after if i != index} | (
                set(dropped.after) if index in op.after else set()
            )
            program[position] = op._replace(after=tuple(sorted(i - (i > index) for i in after)))

    def repeat(self, rank, index):
        """Insert a copy behind an operation; operations that waited for it wait for both."""
        program = self.programs[rank]
        for position in range(index + 1, len(program)):
            after = [i + (i > index) for i in program[position].after]
            also = [index + 1] if index in program[position].after else []
            program[position] = program[position]._replace(after=(*after, *also))
        program.insert(index + 1, program[index])

    def swap(self, rank, index, other):
        """Swap two operations, but not their dependencies."""
        first, second = self.programs[rank][index], self.programs[rank][other]
        self.programs[rank][index] = second._replace(after=first.after)
        self.programs[rank][other] = first._replace(after=second.after)

    def mutated(self):
        programs = [tuple(program) for program in self.programs]
        return replace(self.schedule, program=lambda rank: programs[rank])


def ends_only(change):
    """Return the fault that applies ``change(draft, op)`` to one end of a message."""

    def mutate(draft, rank, index, op):
        fields = change(draft, op)
        if fields is None:
            return False
        draft.change(rank, index, **fields)
        return True

    return mutate


def both_ends(change):
    """Return the fault that applies ``change(draft, op)`` to both ends of a message."""

    def mutate(draft, rank, index, op):
        fields = change(draft, op)
        if op.action is not Action.SEND or fields is None:
            return False
        draft.change(rank, index, **fields)
        draft.change(*draft.other_end[rank, index], **fields)
        return True

    return mutate


def one_later(draft, op):
    return {"start": op.start + 1, "stop": op.stop + 1}


def one_earlier(draft, op):
    return {"start": op.start - 1, "stop": op.stop - 1}


def shorter_at_the_end(draft, op):
    return {"stop": op.stop - 1}


def shorter_at_the_start(draft, op):
    return {"start": op.start + 1}


def longer(draft, op):
    return {"stop": op.stop + 1}


def swapped_with_a_neighbour(draft, op):
    chunks, width = draft.schedule.num_chunks, op.stop - op.start
    start = op.stop if op.stop + width <= chunks else op.start - width
    return {"start": start, "stop": start + width} if start >= 0 else None


def next_peer(draft, op):
    return {"peer": (op.peer + 1) % draft.schedule.size}


def another_lane(draft, op):
    return {"lane": op.lane + 1}


def lane_of_its_own(draft, op):
    return {"lane": 99}


def add_is_copy(draft, op):
    return {"action": Action.COPY} if op.action is Action.ADD else None


def copy_is_add(draft, op):
    return {"action": Action.ADD} if op.action is Action.COPY else None


def send_is_receive(draft, op):
    return {"action": Action.ADD} if op.action is Action.SEND else {"action": Action.SEND}


def waits_for_the_future(draft, op):
    return {"after": (10_000,)}


def waits_for_itself(draft, rank, index, op):
    draft.change(rank, index, after=(index,))
    return True


def one_end_dropped(draft, rank, index, op):
    draft.drop(rank, index)
    return True


def message_dropped(draft, rank, index, op):
    if op.action is not Action.SEND:
        return False
    other = draft.other_end[rank, index]
    draft.drop(rank, index)
    draft.drop(*other)
    return True


def one_end_twice(draft, rank, index, op):
    draft.repeat(rank, index)
    return True


def added_twice(draft, rank, index, op):
    other = draft.other_end[rank, index]
    if op.action is not Action.ADD:
        return False
    draft.repeat(rank, index)
    draft.repeat(*other)
    return True


def two_messages_of_a_route_swapped(draft, rank, index, op):
    for other in range(index + 1, len(draft.programs[rank])):
        later = draft.programs[rank][other]
        same_route = (later.peer, later.lane, later.action is Action.SEND) == (
            op.peer,
            op.lane,
            op.action is Action.SEND,
        )
        if same_route:
            draft.swap(rank, index, other)
            return (later.start, later.stop) != (op.start, op.stop)
    return False


def dependency_missing(draft, rank, index, op):
    needed = [draft.programs[rank][i] for i in op.after]
    opens = op in [batch.ops[0] for batch in rounds(draft.schedule, rank)]
    if not opens or not any(clash(op, earlier) for earlier in needed):
        return False
    draft.change(rank, index, after=())
    return True


def clash(op, earlier):
    """Return whether one of the two operations uses chunks that the other changes."""
    both = {op.action, earlier.action}
    harmless = both == {Action.SEND} or (both == {Action.ADD} and op.lane == earlier.lane)
    return op.start < earlier.stop and earlier.start < op.stop and not harmless


def everything_at_once(draft, rank, index, op):
    if index or len(draft.programs[rank]) < 2:
        return False
    draft.programs[rank] = [o._replace(after=()) for o in draft.programs[rank]]
    return any(
        clash(a, b) for a in draft.programs[rank] for b in draft.programs[rank] if a is not b
    )


KINDS = {
    **{
        f"one end, {change.__name__}": ends_only(change)
        for change in (
            one_later,
            one_earlier,
            shorter_at_the_end,
            shorter_at_the_start,
            longer,
            swapped_with_a_neighbour,
            next_peer,
            another_lane,
            lane_of_its_own,
            add_is_copy,
            copy_is_add,
            send_is_receive,
            waits_for_the_future,
        )
    },
    **{
        f"both ends, {change.__name__}": both_ends(change)
        for change in (
            one_later,
            one_earlier,
            shorter_at_the_end,
            shorter_at_the_start,
            swapped_with_a_neighbour,
        )
    },
    **{
        mutate.__name__: mutate
        for mutate in (
            waits_for_itself,
            one_end_dropped,
            message_dropped,
            one_end_twice,
            added_twice,
            two_messages_of_a_route_swapped,
            dependency_missing,
            everything_at_once,
        )
    },
}


ABSENT = {
    ("double-tree", "two_messages_of_a_route_swapped"),
    ("double-tree in parts", "two_messages_of_a_route_swapped"),
    *(
        (name, kind)
        for name in ("host-all-gather", "host-all-gather in parts")
        for kind in ("one end, add_is_copy", "added_twice")
    ),
}
"""Faults that cannot occur: a double tree has one message for each route, and a gather no sums."""
CASES = [(name, kind) for name in SCHEDULES for kind in KINDS if (name, kind) not in ABSENT]


def mutants(name, kind):
    """Return schedules of ``name`` with a fault of ``kind``, at a few of its positions."""
    schedule = schedule_of(name)
    found = []
    original = Draft(schedule)
    for rank, index, _ in original.positions():
        draft = original.copy()
        if KINDS[kind](draft, rank, index, draft.programs[rank][index]):
            found.append(draft.mutated())
    return found[:: -(-len(found) // POSITIONS) or 1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_without_faults_are_valid(name):
    verify(name, schedule_of(name))
    verify(name, Draft(schedule_of(name)).mutated())


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_fault_is_refused_with_the_name_of_the_schedule(name, kind):
    broken = mutants(name, kind)
    assert broken, "no position for this fault: then it belongs to ABSENT"
    for schedule in broken:
        with pytest.raises(ScheduleError, match=f"^{schedule.name} for {schedule.size} ranks: "):
            verify(name, schedule)


def test_there_are_many_faults_at_many_positions():
    assert len(KINDS) >= 25
    assert len(CASES) * POSITIONS >= 1000
    assert sum(len(mutants("masters", kind)) for kind in KINDS) >= 50


def test_a_deadlock_is_named():
    ring = ALLREDUCE["ring"](Mesh((3,)), 1)

    def receive_first(rank):
        send, receive, *_ = ring.program(rank)
        return (receive._replace(after=()), send._replace(after=(0,)))

    with pytest.raises(ScheduleError, match="deadlock, these ranks wait: rank 0 for \\[2\\]"):
        verify_allreduce(replace(ring, program=receive_first))

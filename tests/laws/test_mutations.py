"""A schedule with one fault is refused, whatever the fault and wherever it is.

The faults are generated: every kind, at places spread over the programs of all ranks. Only places
where it is one are taken. Some changes are none, and are left out on purpose:

- a copied message sent twice, at both ends, arrives twice and means the same;
- two additions of one lane may share a round, which applies them in program order;
- a dependency is redundant where the operation neither reads nor writes the chunks of what it
  waits for, or where an earlier operation of its round waits too; so a dependency is dropped only
  from the operation that opens a round, and only if that round uses what it waited for.
"""

from collections import defaultdict
from copy import copy
from dataclasses import replace

import pytest

from stretto.cluster.world import Mesh
from stretto.comm.algorithms import ALLREDUCE, host_all_gather, host_reduce_scatter
from stretto.comm.schedule import Action, rounds
from stretto.comm.verify import verify_all_gather, verify_allreduce, verify_reduce_scatter
from stretto.errors import ScheduleError

SUBJECTS = {
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
"""Those that are no all-reduce."""
PLACES = 4
"""How many places of each kind are tried in each schedule, spread evenly over all there are."""


def subject(name):
    mesh, parts = SUBJECTS[name]
    word = name.split(" ")[0]
    return OTHERS[word][0](mesh, parts) if word in OTHERS else ALLREDUCE[word](mesh, parts)


def verify(name, schedule):
    (mesh, _), word = SUBJECTS[name], name.split(" ")[0]
    if word in OTHERS:
        OTHERS[word][1](schedule, mesh.ranks_per_host[0])
    else:
        verify_allreduce(schedule)


class Draft:
    """Every rank's program, open to change, and which operations are two ends of one message."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.programs = [list(schedule.program(rank)) for rank in range(schedule.size)]
        sends, receives = defaultdict(list), defaultdict(list)
        for rank, index, op in self.places():
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

    def places(self):
        for rank, program in enumerate(self.programs):
            for index, op in enumerate(program):
                yield rank, index, op

    def change(self, rank, index, **fields):
        self.programs[rank][index] = self.programs[rank][index]._replace(**fields)

    def drop(self, rank, index):
        """Take an operation out; whoever waited for it waits for what it waited for."""
        program = self.programs[rank]
        gone = program.pop(index)
        for place, op in enumerate(program):
            after = {i for i in op.after if i != index} | (
                set(gone.after) if index in op.after else set()
            )
            program[place] = op._replace(after=tuple(sorted(i - (i > index) for i in after)))

    def repeat(self, rank, index):
        """Put an operation in again behind itself; whoever waited for it waits for both."""
        program = self.programs[rank]
        for place in range(index + 1, len(program)):
            after = [i + (i > index) for i in program[place].after]
            also = [index + 1] if index in program[place].after else []
            program[place] = program[place]._replace(after=(*after, *also))
        program.insert(index + 1, program[index])

    def swap(self, rank, index, other):
        """Let two operations change places, everything else staying as it is."""
        first, second = self.programs[rank][index], self.programs[rank][other]
        self.programs[rank][index] = second._replace(after=first.after)
        self.programs[rank][other] = first._replace(after=second.after)

    def mutated(self):
        programs = [tuple(program) for program in self.programs]
        return replace(self.schedule, program=lambda rank: programs[rank])


def ends_only(change):
    """Return the kind of fault in which ``change(draft, op)`` is made at one end of a message."""

    def mutate(draft, rank, index, op):
        fields = change(draft, op)
        if fields is None:
            return False
        draft.change(rank, index, **fields)
        return True

    return mutate


def both_ends(change):
    """Return the kind in which both ends of a message are changed alike."""

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
    """Return whether one of the two uses what the other changes."""
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
"""Each lane between two ranks of a double tree carries a single message; a gather adds nothing."""
CASES = [(name, kind) for name in SUBJECTS for kind in KINDS if (name, kind) not in ABSENT]


def mutants(name, kind):
    """Return the schedules of ``name`` with a fault of ``kind``, at a few places of many."""
    schedule = subject(name)
    found = []
    fresh = Draft(schedule)
    for rank, index, _ in fresh.places():
        draft = fresh.copy()
        if KINDS[kind](draft, rank, index, draft.programs[rank][index]):
            found.append(draft.mutated())
    return found[:: -(-len(found) // PLACES) or 1]


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_going_to_be_broken_is_sound(name):
    verify(name, subject(name))
    verify(name, Draft(subject(name)).mutated())


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_fault_is_refused_and_says_in_which_schedule(name, kind):
    broken = mutants(name, kind)
    assert broken, "no place for this fault: then it belongs to ABSENT"
    for schedule in broken:
        with pytest.raises(ScheduleError, match=f"^{schedule.name} for {schedule.size} ranks: "):
            verify(name, schedule)


def test_there_are_many_faults_at_many_places():
    assert len(KINDS) >= 25
    assert len(CASES) * PLACES >= 1000
    assert sum(len(mutants("masters", kind)) for kind in KINDS) >= 50


def test_a_circle_of_waits_is_named():
    ring = ALLREDUCE["ring"](Mesh((3,)), 1)

    def receive_first(rank):
        send, receive, *_ = ring.program(rank)
        return (receive._replace(after=()), send._replace(after=(0,)))

    with pytest.raises(ScheduleError, match="nobody can go on: rank 0 for \\[2\\]"):
        verify_allreduce(replace(ring, program=receive_first))

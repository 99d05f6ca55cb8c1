"""What the kernel does to messages: it takes their ends off the sender's hands, and it queues."""

import pytest

from stretto.cluster.world import Mesh
from stretto.comm.algorithms import ALLREDUCE
from stretto.comm.schedule import Action, Op, Schedule
from stretto.sim import Cluster, Transport, predict, price

QUICK = Transport(latency_s=0.5, bytes_per_s=1000.0)


def cluster(shape, **kernel):
    line = Transport(latency_s=1.0, bytes_per_s=100.0, **kernel)
    return Cluster(ranks_per_host=shape, between=line, inside=QUICK)


def send(peer, start=0, stop=1, **more):
    return Op(Action.SEND, peer, start, stop, **more)


def copy(peer, start=0, stop=1, **more):
    return Op(Action.COPY, peer, start, stop, **more)


def schedule(*programs, chunks=1):
    return Schedule("made up", len(programs), chunks, lambda rank: programs[rank])


@pytest.mark.parametrize("buffered", [0, 100, 400, 1000])
def test_a_receiver_has_a_message_when_all_of_it_has_come(buffered):
    one_way = schedule((send(1),), (copy(0),))
    where = cluster((1, 1), buffered_bytes=buffered)
    assert price(one_way, 400, where).seconds == pytest.approx(1 + 4)


@pytest.mark.parametrize(("buffered", "expected_s"), [(0, 5 + 5), (100, 9), (200, 9), (400, 9)])
def test_a_sender_goes_on_while_the_end_of_its_message_is_on_its_way(buffered, expected_s):
    # Two messages one after the other: the second's latency passes while the first still works.
    two = schedule((send(1), send(2, after=(0,))), (copy(0),), (copy(0),))
    where = cluster((1, 1, 1), buffered_bytes=buffered)
    assert price(two, 400, where).seconds == pytest.approx(expected_s)


def test_a_message_is_drawn_from_its_beginning_to_its_end():
    one_way = schedule((send(1),), (copy(0),))
    sender, _ = predict(one_way, 400, cluster((1, 1), buffered_bytes=100))
    assert [(span.start_s, span.end_s) for span in sender.spans] == [(0, 5)]


@pytest.mark.parametrize(("queued", "expected_s"), [(0, 4), (50, 4.5), (150, 5.5), (1000, 6)])
def test_a_receivers_word_stands_behind_what_its_host_sends(queued, expected_s):
    # Rank 0 sends for 3 s, from 1 to 4; at 2 it is ready for its second message: its word waits
    # behind what stands in the line by then, 2 s of work at most.
    mine = (send(1, 0, 3), copy(2, 3, 4, lane=1), copy(2, 3, 4, lane=1, after=(1,)))
    theirs = (send(0, 3, 4, lane=1), send(0, 3, 4, lane=1, after=(0,)))
    made = schedule(mine, (copy(0, 0, 3),), theirs, chunks=4)
    where = cluster((1, 1, 1), queued_bytes=queued)
    assert price(made, 400, where).seconds == pytest.approx(expected_s)


def test_words_that_leave_before_the_bulk_wait_for_nothing():
    ring = ALLREDUCE["ring"](Mesh((1, 1, 1)), 1)
    plain, queued = (cluster((1, 1, 1), queued_bytes=q) for q in (0, 500))
    assert price(ring, 3000, queued).seconds == pytest.approx(price(ring, 3000, plain).seconds)


def test_lanes_that_could_begin_together_take_turns_and_then_use_both_directions():
    # Each lane sends 2 s of work there and back. In step they would share both ways: 2 x (1 + 4).
    there = (send(1), copy(1, after=(0,)), send(1, 1, 2, lane=1), copy(1, 1, 2, lane=1, after=(2,)))
    back = (copy(0), send(0, after=(0,)), copy(0, 1, 2, lane=1), send(0, 1, 2, lane=1, after=(2,)))
    made = schedule(there, back, chunks=2)
    assert price(made, 400, cluster((1, 1))).seconds == pytest.approx(3 + 3 + 3)

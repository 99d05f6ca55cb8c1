"""Prices with socket buffers, which take the end of a message, and with queues on links."""

import pytest

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALLREDUCE
from stretto.collectives.schedule import Action, Op, Schedule
from stretto.simulator import Cluster, LinkCosts, predict_timelines, price

QUICK = LinkCosts(latency_s=0.5, bytes_per_s=1000.0)


def cluster(shape, **kernel):
    line = LinkCosts(latency_s=1.0, bytes_per_s=100.0, **kernel)
    return Cluster(ranks_per_host=shape, between=line, inside=QUICK)


def send(peer, start=0, stop=1, **more):
    return Op(Action.SEND, peer, start, stop, **more)


def copy(peer, start=0, stop=1, **more):
    return Op(Action.COPY, peer, start, stop, **more)


def schedule(*programs, chunks=1):
    return Schedule("made up", len(programs), chunks, lambda rank: programs[rank])


@pytest.mark.parametrize("buffered", [0, 100, 400, 1000])
def test_buffering_does_not_change_when_a_message_is_received(buffered):
    one_way = schedule((send(1),), (copy(0),))
    where = cluster((1, 1), buffered_bytes=buffered)
    assert price(one_way, 400, where).seconds == pytest.approx(1 + 4)


@pytest.mark.parametrize(("buffered", "expected_s"), [(0, 5 + 5), (100, 9), (200, 9), (400, 9)])
def test_a_sender_continues_while_the_end_of_its_message_is_in_transit(buffered, expected_s):
    # Of two consecutive messages, the second one's latency overlaps the end of the first.
    two = schedule((send(1), send(2, after=(0,))), (copy(0),), (copy(0),))
    where = cluster((1, 1, 1), buffered_bytes=buffered)
    assert price(two, 400, where).seconds == pytest.approx(expected_s)


def test_a_timeline_shows_a_buffered_message_as_one_span():
    one_way = schedule((send(1),), (copy(0),))
    sender, _ = predict_timelines(one_way, 400, cluster((1, 1), buffered_bytes=100))
    assert [(span.start_s, span.end_s) for span in sender.spans] == [(0, 5)]


@pytest.mark.parametrize(("queued", "expected_s"), [(0, 4), (50, 4.5), (150, 5.5), (1000, 6)])
def test_a_receivers_ready_message_waits_behind_what_its_host_sends(queued, expected_s):
    # Rank 0 sends for 3 s, from 1 to 4. At 2 it is ready for its second message. Its ready message
    # waits behind the bytes that are queued by then, at most 2 s of work.
    first = (send(1, 0, 3), copy(2, 3, 4, lane=1), copy(2, 3, 4, lane=1, after=(1,)))
    third = (send(0, 3, 4, lane=1), send(0, 3, 4, lane=1, after=(0,)))
    made = schedule(first, (copy(0, 0, 3),), third, chunks=4)
    where = cluster((1, 1, 1), queued_bytes=queued)
    assert price(made, 400, where).seconds == pytest.approx(expected_s)


def test_ready_messages_before_the_bulk_are_not_delayed():
    ring = ALLREDUCE["ring"](Mesh((1, 1, 1)), 1)
    plain, queued = (cluster((1, 1, 1), queued_bytes=q) for q in (0, 500))
    assert price(ring, 3000, queued).seconds == pytest.approx(price(ring, 3000, plain).seconds)


def test_staggered_lanes_use_both_directions_of_a_link():
    # Each lane sends 2 s of work there and back. In lock-step the lanes would share both
    # directions: 2 x (1 + 4).
    there = (send(1), copy(1, after=(0,)), send(1, 1, 2, lane=1), copy(1, 1, 2, lane=1, after=(2,)))
    back = (copy(0), send(0, after=(0,)), copy(0, 1, 2, lane=1), send(0, 1, 2, lane=1, after=(2,)))
    made = schedule(there, back, chunks=2)
    assert price(made, 400, cluster((1, 1))).seconds == pytest.approx(3 + 3 + 3)

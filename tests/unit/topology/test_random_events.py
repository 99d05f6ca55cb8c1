"""Orders of acts are such as real ranks may come to, and peers of active ranks are drawn evenly."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.topology.random_events import Act, is_active, passive_peer, random_events


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 7), steps=st.integers(0, 6), seed=st.integers(0, 2**64))
def test_every_worker_acts_in_an_order_that_it_could_have_come_to(size, steps, seed):
    done = defaultdict(list)
    for event in random_events(size, steps, seed):
        done[event.worker, event.act].append(event.step)
        read, applied, averaged = (len(done[event.worker, act]) for act in Act)
        assert applied <= read <= applied + 1
        if is_active(event.worker) and size > 1:
            assert averaged <= applied
            assert read <= averaged + 2, "a visit ends before the next step but one begins"
        assert (event.peer != event.worker) == (event.act is Act.AVERAGE)
    for worker in range(size):
        averages = steps if is_active(worker) and size > 1 else 0
        assert done[worker, Act.READ] == done[worker, Act.APPLY] == list(range(steps))
        assert done[worker, Act.AVERAGE] == list(range(averages))


def test_an_active_worker_averages_with_the_peer_that_a_real_one_would_visit():
    for event in random_events(5, 20, seed=3):
        if event.act is Act.AVERAGE:
            assert event.peer == passive_peer(event.worker, 5, event.step, seed=3)


def test_acts_of_a_worker_come_about_in_both_orders():
    seen = {
        (before.act, after.act)
        for seed in range(8)
        for acts in [[event for event in random_events(2, 8, seed) if event.worker == 0]]
        for before, after in pairwise(acts)
    }
    assert {(Act.AVERAGE, Act.APPLY), (Act.APPLY, Act.AVERAGE), (Act.READ, Act.AVERAGE)} <= seen


@pytest.mark.parametrize(("size", "passive"), [(2, [1]), (3, [1]), (8, [1, 3, 5, 7])])
def test_peers_are_passive_and_each_is_as_likely(size, passive):
    drawn = Counter(passive_peer(0, size, step) for step in range(4000))
    assert sorted(drawn) == passive
    assert min(drawn.values()) > 0.9 * 4000 / len(passive)


def test_peers_are_drawn_by_rank_seed_and_step():
    def peers(rank, seed):
        return [passive_peer(rank, 16, step, seed) for step in range(20)]

    assert peers(0, 1) != peers(2, 1)
    assert peers(0, 1) != peers(0, 2)
    assert passive_peer(0, 1, 0) is None
    assert passive_peer(3, 4, 0) is None, "who is passive goes to nobody"


def test_a_worker_of_a_low_pace_is_slow():
    events = list(random_events(4, 50, seed=1, paces=(20, 1, 20, 20)))
    last = {event.worker: place for place, event in enumerate(events)}
    others = max(place for worker, place in last.items() if worker != 1)
    before = sum(e.act is Act.APPLY for e in events[:others] if e.worker == 1)
    assert before < 25


@pytest.mark.parametrize("ahead", [1, 3])
def test_nobody_begins_a_step_too_far_ahead_of_the_slowest(ahead):
    begun = [7] * 4
    events = list(random_events(4, 40, 2, (1, 9, 9, 9), first=7, ahead=ahead))
    for event in events:
        if event.act is Act.READ:
            assert event.step == begun[event.worker] < min(begun) + ahead
            begun[event.worker] += 1
    assert begun == [47] * 4
    free = list(random_events(4, 40, 2, (1, 9, 9, 9), first=7))
    assert sorted(free) == sorted(events)
    assert free != events


def test_after_a_meeting_the_order_is_another_and_so_are_the_peers():
    shapes = [
        [(e.act, e.worker) for e in random_events(4, 6, 1, first=first)] for first in (0, 6, 12)
    ]
    assert shapes[0] != shapes[1] != shapes[2]
    for event in random_events(4, 6, 1, first=6):
        if event.act is Act.AVERAGE:
            assert event.peer == passive_peer(event.worker, 4, event.step, 1)

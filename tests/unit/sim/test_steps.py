"""The price of a training step, by examples that can be added up by hand."""

from dataclasses import replace

import pytest

from stretto.comm.algorithms.table import parse_table
from stretto.sim.charge import CORES, INSIDE, LATENCY, LINK
from stretto.sim.price import price
from stretto.sim.steps import Exchange, Rhythm, of_topology, price_sums, price_talks
from stretto.sim.steps.sums import SumCosts
from stretto.topology import named
from tests.laws.test_steps import cluster

RATE = 10_000_000
EXPONENTIAL = named("one-peer-exponential")


def one(num_bytes: float, leaves_s: float, due_s: float, compute_s: float = 1.0) -> Rhythm:
    return Rhythm(compute_s, (Exchange(num_bytes, leaves_s, due_s),))


def talked(rhythm, topology, there):
    return price_talks(rhythm, of_topology(topology, there.mesh.size), there)


def test_what_is_due_at_once_is_waited_for():
    there = cluster(4, rate=RATE)
    priced = talked(one(RATE, 0.6, 0.6), EXPONENTIAL, there)
    assert priced.seconds == pytest.approx(1 + 1 + there.between.latency_s)
    assert priced.exposed_s == pytest.approx(1 + there.between.latency_s)
    assert priced.efficiency == pytest.approx(0.5, rel=1e-3)
    assert priced.held_up_by == LINK


def test_what_has_time_to_travel_is_hidden():
    priced = talked(one(RATE / 4, 0.6, 0.9), EXPONENTIAL, cluster(4, rate=RATE))
    assert priced.seconds == pytest.approx(1)
    assert priced.held_up_by == "computation"
    # A tenth of a second too little time.
    late = talked(one(RATE * 0.4, 0.6, 0.9), EXPONENTIAL, cluster(4, rate=RATE))
    assert late.seconds == pytest.approx(1.1, rel=1e-3)


def test_a_round_now_and_then_is_shared_by_its_steps():
    rhythm = replace(one(RATE, 4.0, 4.0, compute_s=4.0), steps=4)
    priced = talked(rhythm, EXPONENTIAL, cluster(4, rate=RATE))
    assert priced.seconds == pytest.approx((4 + 1) / 4, rel=1e-3)
    assert priced.compute_s == 1
    assert priced.bytes_per_link == pytest.approx(RATE / 4)


def test_ranks_of_a_host_share_its_link():
    """Of a ring of hosts of two, each rank has one peer on its host and one elsewhere."""
    there = cluster(4, 2, rate=RATE)
    priced = talked(one(RATE, 0.6, 0.6), named("ring"), there)
    assert priced.bytes_per_link == pytest.approx(2 * RATE)
    assert priced.seconds == pytest.approx(1 + 2, rel=1e-3)


def test_peers_on_one_host_use_no_link():
    priced = talked(one(50 * RATE, 0.6, 0.6), EXPONENTIAL, cluster(1, 4, rate=RATE))
    assert priced.bytes_per_link == 0
    assert priced.bound_s == 1
    assert priced.seconds == pytest.approx(1.5, rel=1e-3)
    assert priced.held_up_by == INSIDE


def test_cores_and_latency_are_named_where_they_hold_a_step_up():
    busy = cluster(4, rate=1e12, s_per_byte_between=4e-7)
    priced = talked(one(RATE, 0.6, 0.6), EXPONENTIAL, busy)
    assert priced.held_up_by in {CORES, "I/O thread of a rank"}
    far = busy.between.model_copy(update={"latency_s": 0.5})
    there = cluster(4, rate=1e12).model_copy(update={"between": far})
    assert talked(one(1000, 0.6, 0.6), EXPONENTIAL, there).held_up_by == LATENCY


def test_computation_beside_messages_is_slower():
    """The link is busy all the time: computation takes the whole of its factor."""
    there = cluster(4, rate=RATE)
    slow = replace(one(RATE, 0.5, 1.5), slowdown=1.5)
    assert talked(slow, EXPONENTIAL, there).seconds == pytest.approx(1.5, rel=0.12)
    idle = replace(one(RATE / 1000, 0.5, 1.5), slowdown=1.5)
    assert talked(idle, EXPONENTIAL, there).seconds == pytest.approx(1.0, rel=1e-2)


def test_a_sum_that_is_waited_for_costs_its_price():
    there, size = cluster(4, rate=RATE), 4**10
    ring = parse_table("ring")
    alone = price(ring.pick(size).schedule(there.mesh), size, there)
    priced = price_sums(one(size, 0.6, 0.6), ring, there)
    assert priced.seconds == pytest.approx(1 + alone.seconds)
    assert priced.bytes_per_link == pytest.approx(alone.bytes_per_link)
    assert priced.held_up_by == LINK


@pytest.mark.parametrize("times", [0.1, 0.5, 1.0, 3.0])
def test_sums_follow_each_other_along_backward(times):
    """As a recurrence says: a bucket begins when it is ready and the one before it is over."""
    there, size = cluster(4, rate=RATE * times), 4**9
    places = [0.1, 0.2, 0.25, 0.6]
    dues = [0.6, 0.65, 0.7, 0.75]
    each_s = SumCosts(parse_table("ring"), there).of(size).pace_s
    rhythm = Rhythm(1.0, tuple(Exchange(size, *at) for at in zip(places, dues, strict=True)))
    over_s, done_s, now_s, events = 0.0, 0.0, 0.0, []
    for place, due in zip(places, dues, strict=True):
        over_s = max(over_s, place) + each_s
        events.append((due, over_s))
    for due, arrived_s in events:  # nobody waits before 0.6: places are times up to there
        now_s = max(now_s + due - done_s, arrived_s)
        done_s = due
    expected_s = now_s + 1.0 - done_s
    priced = price_sums(rhythm, parse_table("ring"), there)
    assert priced.seconds == pytest.approx(expected_s, rel=1e-6)


def test_phases_of_sums_overlap_where_they_have_lanes_of_their_own():
    there = cluster(3, 2, rate=RATE, s_per_byte_inside=2e-8)
    cost = SumCosts(parse_table("hierarchical"), there).of(4**10)
    assert cost.pace_s < 0.95 * cost.alone_s
    # Who waits for the last of them has all of its phases to wait for.
    alone = price_sums(one(4**10, 0.6, 0.6), parse_table("hierarchical"), there)
    assert alone.exposed_s == pytest.approx(cost.alone_s)
    flat = SumCosts(parse_table("ring"), there).of(4**10)
    assert flat.pace_s == flat.alone_s


def test_prices_between_powers_of_four_lie_on_a_line():
    costs = SumCosts(parse_table("ring"), cluster(4, rate=RATE))
    low, middle, high = (costs.of(size) for size in (4**9, (4**9 + 4**10) / 2, 4**10))
    assert middle.alone_s == pytest.approx((low.alone_s + high.alone_s) / 2)
    assert middle.bytes_per_link == pytest.approx((low.bytes_per_link + high.bytes_per_link) / 2)
    assert middle.spent_s[LINK] == pytest.approx((low.spent_s[LINK] + high.spent_s[LINK]) / 2)

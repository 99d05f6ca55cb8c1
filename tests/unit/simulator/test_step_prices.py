"""Prices of training steps, checked against sums made by hand."""

from dataclasses import replace

import pytest

from stretto.collectives.algorithm_table import parse_table
from stretto.simulator.message_costs import CORES, INSIDE, LATENCY, LINK
from stretto.simulator.peer_exchanges import pattern_of_topology
from stretto.simulator.price import price
from stretto.simulator.step_price import (
    AllReduceCosts,
    price_exchanges_by_all_reduce,
    price_peer_exchanges,
)
from stretto.simulator.step_timeline import Exchange, StepTimeline
from stretto.topology import make_topology
from tests.laws.test_steps import cluster

RATE = 10_000_000
EXPONENTIAL = make_topology("one-peer-exponential")


def one(num_bytes: float, issue_s: float, due_s: float, compute_s: float = 1.0) -> StepTimeline:
    return StepTimeline(compute_s, (Exchange(num_bytes, issue_s, due_s),))


def price_gossip(step_timeline, topology, where):
    return price_peer_exchanges(
        step_timeline, pattern_of_topology(topology, where.mesh.size), where
    )


def test_an_exchange_due_where_it_is_issued_is_exposed():
    where = cluster(4, rate=RATE)
    priced = price_gossip(one(RATE, 0.6, 0.6), EXPONENTIAL, where)
    assert priced.seconds == pytest.approx(1 + 1 + where.between.latency_s)
    assert priced.exposed_s == pytest.approx(1 + where.between.latency_s)
    assert priced.efficiency == pytest.approx(0.5, rel=1e-3)
    assert priced.bottleneck == LINK


def test_an_exchange_with_enough_time_is_hidden():
    priced = price_gossip(one(RATE / 4, 0.6, 0.9), EXPONENTIAL, cluster(4, rate=RATE))
    assert priced.seconds == pytest.approx(1)
    assert priced.bottleneck == "computation"
    # The message takes a tenth of a second too long.
    late = price_gossip(one(RATE * 0.4, 0.6, 0.9), EXPONENTIAL, cluster(4, rate=RATE))
    assert late.seconds == pytest.approx(1.1, rel=1e-3)


def test_the_cost_of_a_round_is_shared_by_the_steps_of_its_period():
    step_timeline = replace(one(RATE, 4.0, 4.0, compute_s=4.0), steps=4)
    priced = price_gossip(step_timeline, EXPONENTIAL, cluster(4, rate=RATE))
    assert priced.seconds == pytest.approx((4 + 1) / 4, rel=1e-3)
    assert priced.compute_s == 1
    assert priced.bytes_per_link == pytest.approx(RATE / 4)


def test_ranks_of_a_host_share_its_link():
    """In a ring over hosts of two ranks, each rank has one peer on its host and one on another."""
    where = cluster(4, 2, rate=RATE)
    priced = price_gossip(one(RATE, 0.6, 0.6), make_topology("ring"), where)
    assert priced.bytes_per_link == pytest.approx(2 * RATE)
    assert priced.seconds == pytest.approx(1 + 2, rel=1e-3)


def test_peers_on_one_host_use_no_link():
    priced = price_gossip(one(50 * RATE, 0.6, 0.6), EXPONENTIAL, cluster(1, 4, rate=RATE))
    assert priced.bytes_per_link == 0
    assert priced.bound_s == 1
    assert priced.seconds == pytest.approx(1.5, rel=1e-3)
    assert priced.bottleneck == INSIDE


def test_cores_and_latency_can_be_the_bottleneck():
    busy = cluster(4, rate=1e12, s_per_byte_between=4e-7)
    priced = price_gossip(one(RATE, 0.6, 0.6), EXPONENTIAL, busy)
    assert priced.bottleneck in {CORES, "I/O thread of a rank"}
    far = busy.between.model_copy(update={"latency_s": 0.5})
    where = cluster(4, rate=1e12).model_copy(update={"between": far})
    assert price_gossip(one(1000, 0.6, 0.6), EXPONENTIAL, where).bottleneck == LATENCY


def test_computation_during_messages_is_slower():
    """The link is always busy, so computation is slower by the whole factor."""
    where = cluster(4, rate=RATE)
    slow = replace(one(RATE, 0.5, 1.5), slowdown=1.5)
    assert price_gossip(slow, EXPONENTIAL, where).seconds == pytest.approx(1.5, rel=0.12)
    idle = replace(one(RATE / 1000, 0.5, 1.5), slowdown=1.5)
    assert price_gossip(idle, EXPONENTIAL, where).seconds == pytest.approx(1.0, rel=1e-2)


def test_an_exposed_all_reduce_costs_its_isolated_price():
    where, size = cluster(4, rate=RATE), 4**10
    ring = parse_table("ring")
    isolated = price(ring.pick(size).schedule(where.mesh), size, where)
    priced = price_exchanges_by_all_reduce(one(size, 0.6, 0.6), ring, where)
    assert priced.seconds == pytest.approx(1 + isolated.seconds)
    assert priced.bytes_per_link == pytest.approx(isolated.bytes_per_link)
    assert priced.bottleneck == LINK


@pytest.mark.parametrize("times", [0.1, 0.5, 1.0, 3.0])
def test_all_reduces_run_one_after_another_during_backward(times):
    """A bucket starts when it is ready and the one before it is done, as in this recurrence."""
    where, size = cluster(4, rate=RATE * times), 4**9
    issues = [0.1, 0.2, 0.25, 0.6]
    dues = [0.6, 0.65, 0.7, 0.75]
    each_s = AllReduceCosts(parse_table("ring"), where).cost_of(size).interval_s
    step_timeline = StepTimeline(
        1.0, tuple(Exchange(size, *at) for at in zip(issues, dues, strict=True))
    )
    over_s, done_s, now_s, events = 0.0, 0.0, 0.0, []
    for issue, due in zip(issues, dues, strict=True):
        over_s = max(over_s, issue) + each_s
        events.append((due, over_s))
    for due, arrived_s in events:  # before 0.6 nothing is due, so positions are times
        now_s = max(now_s + due - done_s, arrived_s)
        done_s = due
    expected_s = now_s + 1.0 - done_s
    priced = price_exchanges_by_all_reduce(step_timeline, parse_table("ring"), where)
    assert priced.seconds == pytest.approx(expected_s, rel=1e-6)


def test_phases_of_all_reduces_overlap_if_they_have_their_own_lanes():
    where = cluster(3, 2, rate=RATE, s_per_byte_inside=2e-8)
    cost = AllReduceCosts(parse_table("hierarchical"), where).cost_of(4**10)
    assert cost.interval_s < 0.95 * cost.isolated_s
    # A step that waits for the last all-reduce waits for all its phases.
    exposed = price_exchanges_by_all_reduce(
        one(4**10, 0.6, 0.6), parse_table("hierarchical"), where
    )
    assert exposed.exposed_s == pytest.approx(cost.isolated_s)
    flat = AllReduceCosts(parse_table("ring"), where).cost_of(4**10)
    assert flat.interval_s == flat.isolated_s


def test_costs_between_powers_of_four_are_interpolated():
    costs = AllReduceCosts(parse_table("ring"), cluster(4, rate=RATE))
    low, middle, high = (costs.cost_of(size) for size in (4**9, (4**9 + 4**10) / 2, 4**10))
    assert middle.isolated_s == pytest.approx((low.isolated_s + high.isolated_s) / 2)
    assert middle.bytes_per_link == pytest.approx((low.bytes_per_link + high.bytes_per_link) / 2)
    assert middle.breakdown_s[LINK] == pytest.approx(
        (low.breakdown_s[LINK] + high.breakdown_s[LINK]) / 2
    )

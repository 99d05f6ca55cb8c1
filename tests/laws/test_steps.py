"""Prices of training steps: laws for all topologies, clusters and step timelines."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.collectives.algorithm_table import parse_table
from stretto.simulator.cluster import Cluster, Cpu, LinkCosts
from stretto.simulator.peer_exchanges import (
    pattern_of_groups,
    pattern_of_topology,
    traffic_of_every_rank,
    traffic_of_pairwise_averaging,
    traffic_of_representative,
)
from stretto.simulator.step_price import (
    price_exchanges_by_all_reduce,
    price_pairwise_averaging,
    price_peer_exchanges,
)
from stretto.simulator.step_timeline import Exchange, StepTimeline, find_steady_state
from stretto.topology import TOPOLOGIES, make_topology, passive_peer

MODEL_BYTES = 24_000_000
STEP_S, BACKWARD_S = 1.0, 0.6
RANDOM = {"derangement", "matching", "equidyn", "undirected-equidyn"}


def cluster(hosts: int, per_host: int = 1, *, rate: float = MODEL_BYTES, **cpu: float) -> Cluster:
    return Cluster(
        ranks_per_host=(per_host,) * hosts,
        between=LinkCosts(latency_s=1e-4, bytes_per_s=rate),
        inside=LinkCosts(latency_s=2e-5, bytes_per_s=100 * rate),
        cpu=Cpu(cores=4, **cpu),
    )


def gossip(segments: int, delay: int, *, every: int = 1) -> StepTimeline:
    """Return equal segments issued during backward, from the last layer to the first."""
    exchanges = []
    before_s = (every - 1) * STEP_S
    for index in range(segments):
        issue_s = before_s + BACKWARD_S * (index + 1) / segments
        due_s = issue_s + delay * every * STEP_S
        if not delay:
            forward_s = (STEP_S - BACKWARD_S) * (segments - 1 - index) / segments
            due_s = before_s + BACKWARD_S + forward_s
        number = segments - 1 - index
        exchanges.append(Exchange(MODEL_BYTES / segments, issue_s, due_s, index % 8, number))
    return StepTimeline(every * STEP_S, tuple(exchanges), every)


def sums(buckets: int) -> StepTimeline:
    """Return equal buckets issued during backward and due at its end."""
    issues = ((index + 1) / buckets * BACKWARD_S for index in range(buckets))
    return StepTimeline(
        STEP_S, tuple(Exchange(MODEL_BYTES / buckets, at, BACKWARD_S) for at in issues)
    )


def possible(sizes: list[int]) -> list[tuple[str, int]]:
    pairs = itertools.product(TOPOLOGIES, sizes)
    return [(name, size) for name, size in pairs if make_topology(name).size_error(size) is None]


@pytest.mark.parametrize(("name", "size"), possible([1]))
def test_a_single_rank_takes_only_its_computation(name, size):
    priced = price_peer_exchanges(
        gossip(4, 1), pattern_of_topology(make_topology(name), size), cluster(size)
    )
    assert priced.seconds == priced.compute_s == priced.bound_s == STEP_S
    assert (priced.bytes_per_link, priced.exposed_s, priced.efficiency) == (0, 0, 1)
    assert priced.bottleneck == "computation"


def test_a_single_rank_has_no_all_reduces():
    priced = price_exchanges_by_all_reduce(sums(4), parse_table("ring"), cluster(1))
    assert priced.seconds == pytest.approx(STEP_S)
    assert (priced.exposed_s, priced.bytes_per_link) == (0, 0)


@pytest.mark.parametrize(("name", "size"), possible([2, 6, 8]))
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_no_step_is_below_its_bound(name, size, delay):
    for per_host, rate in itertools.product((1, 2), (0.3, 5)):
        where = cluster(size // per_host, per_host, rate=rate * MODEL_BYTES, s_per_message=3e-5)
        priced = price_peer_exchanges(
            gossip(3, delay), pattern_of_topology(make_topology(name), size), where
        )
        assert priced.seconds >= priced.bound_s * (1 - 1e-9)
        assert priced.bound_s >= priced.compute_s == STEP_S


@pytest.mark.parametrize("table", ["ring", "doubling", "hierarchical", "native", "torus/2"])
def test_no_step_with_all_reduces_is_below_its_bound(table):
    for hosts, per_host, rate in itertools.product((2, 4), (1, 2), (0.3, 1, 5)):
        where = cluster(hosts, per_host, rate=rate * MODEL_BYTES)
        priced = price_exchanges_by_all_reduce(sums(5), parse_table(table), where)
        assert priced.seconds >= priced.bound_s * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["derangement", "one-peer-exponential", "ring", "static-exponential"]),
    hosts=st.integers(2, 6),
    segments=st.integers(1, 5),
    delay=st.integers(0, 3),
    rates=st.tuples(st.floats(0.1, 10), st.floats(1.0, 8.0)),
)
def test_a_faster_link_never_slows_gossip(name, hosts, segments, delay, rates):
    slow, faster = rates
    seconds = [
        price_peer_exchanges(
            gossip(segments, delay),
            pattern_of_topology(make_topology(name), hosts),
            cluster(hosts, rate=rate),
        ).seconds
        for rate in (slow * MODEL_BYTES, slow * faster * MODEL_BYTES)
    ]
    assert seconds[1] <= seconds[0] * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    table=st.sampled_from(["ring", "doubling", "hierarchical", "double-tree"]),
    shape=st.sampled_from([(2, 1), (5, 1), (2, 2), (3, 2)]),
    buckets=st.integers(1, 6),
    rates=st.tuples(st.floats(0.1, 10), st.floats(1.0, 8.0)),
)
def test_a_faster_link_never_slows_all_reduces(table, shape, buckets, rates):
    slow, faster = rates
    seconds = [
        price_exchanges_by_all_reduce(
            sums(buckets), parse_table(table), cluster(*shape, rate=rate)
        ).seconds
        for rate in (slow * MODEL_BYTES, slow * faster * MODEL_BYTES)
    ]
    assert seconds[1] <= seconds[0] * (1 + 1e-9)


@pytest.mark.parametrize("times", [0.25, 0.5, 0.9, 1.1, 2, 8])
@pytest.mark.parametrize("segments", [1, 4])
def test_with_a_delay_a_step_takes_the_longer_of_computation_and_transfer(times, segments):
    """Sending the model takes ``times`` as long as the computation of a step."""
    where = cluster(8, rate=MODEL_BYTES / times)
    priced = price_peer_exchanges(
        gossip(segments, 1), pattern_of_topology(make_topology("derangement"), 8), where
    )
    assert priced.seconds == pytest.approx(max(STEP_S, times), rel=2e-3)
    assert priced.bytes_per_link == pytest.approx(MODEL_BYTES)


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, size in possible([5, 8]) if name not in RANDOM]
)
def test_a_longer_delay_is_never_slower(name, size):
    where = cluster(size, rate=0.8 * MODEL_BYTES)
    pattern = pattern_of_topology(make_topology(name), size)
    seconds = [price_peer_exchanges(gossip(3, d), pattern, where).seconds for d in range(4)]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(seconds))


@pytest.mark.parametrize(("name", "size"), possible([2, 6, 8]))
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_one_rank_represents_all_where_each_is_a_host(name, size, delay):
    """It holds by symmetry if all ranks have the same number of peers.

    `matching` of an odd number of ranks is not such a case.
    """
    step_timeline, where = (
        gossip(4, delay),
        cluster(size, rate=0.7 * MODEL_BYTES, s_per_byte_between=1e-9),
    )
    pattern = pattern_of_topology(make_topology(name), where.mesh.size)
    representative_s = find_steady_state(
        step_timeline, traffic_of_representative(step_timeline, pattern, where)
    ).period_s
    every_rank_s = find_steady_state(step_timeline, traffic_of_every_rank(pattern, where)).period_s
    assert representative_s == pytest.approx(every_rank_s, rel=0.08 if name in RANDOM else 1e-5)


@pytest.mark.parametrize("name", ["derangement", "one-peer-exponential", "base", "ring"])
@pytest.mark.parametrize(("hosts", "per_host"), [(4, 2), (4, 4)])
@pytest.mark.parametrize(("segments", "delay"), [(1, 0), (6, 0), (6, 1)])
def test_one_rank_represents_all_where_hosts_have_several_ranks(
    name, hosts, per_host, segments, delay
):
    step_timeline = gossip(segments, delay)
    where = cluster(hosts, per_host, rate=0.6 * per_host * MODEL_BYTES)
    pattern = pattern_of_topology(make_topology(name), where.mesh.size)
    representative_s = find_steady_state(
        step_timeline, traffic_of_representative(step_timeline, pattern, where)
    ).period_s
    every_rank_s = find_steady_state(step_timeline, traffic_of_every_rank(pattern, where)).period_s
    assert representative_s == pytest.approx(every_rank_s, rel=0.08 if name in RANDOM else 0.03)


@pytest.mark.parametrize(
    ("name", "size"), [*possible([1024]), ("derangement", 10_000), ("one-peer-exponential", 10_000)]
)
def test_thousands_of_ranks_can_be_priced(name, size):
    pattern = pattern_of_topology(make_topology(name), size)
    priced = price_peer_exchanges(gossip(8, 1), pattern, cluster(size // 8, 8, rate=MODEL_BYTES))
    assert priced.seconds >= priced.bound_s * (1 - 1e-9)
    assert priced.bound_s > STEP_S


PAIRWISE = StepTimeline(STEP_S, (Exchange(MODEL_BYTES, BACKWARD_S, BACKWARD_S + STEP_S),))
AHEAD = 8


def pairwise_s(where: Cluster) -> float:
    return price_pairwise_averaging(PAIRWISE, passive_peer, AHEAD, where).seconds


def test_a_single_rank_averages_with_nobody():
    priced = price_pairwise_averaging(PAIRWISE, passive_peer, AHEAD, cluster(1))
    assert (priced.seconds, priced.bytes_per_link) == (STEP_S, 0)


@pytest.mark.parametrize("transfer_s", [0.1, 0.9, 1.5, 4.0])
def test_of_two_ranks_only_the_active_one_may_wait_for_the_link(transfer_s):
    where = cluster(2, rate=MODEL_BYTES / transfer_s)
    assert pairwise_s(where) == pytest.approx(max(STEP_S, transfer_s + 3 * where.between.latency_s))


def test_active_ranks_with_the_same_passive_peer_wait_for_each_other():
    """Of three ranks, two are active and share one passive peer."""
    assert pairwise_s(cluster(3, rate=MODEL_BYTES / 0.7)) == pytest.approx(1.4, rel=1e-2)
    assert pairwise_s(cluster(3, rate=MODEL_BYTES / 0.3)) == pytest.approx(STEP_S, rel=1e-6)


@pytest.mark.parametrize("hosts", [4, 7, 16])
def test_adpsgd_pairs_averaging_is_bounded_by_the_link_and_every_active_rank_sends_a_model(hosts):
    for transfer_s in (0.5, 1.0, 3.0):
        where = cluster(hosts, rate=MODEL_BYTES / transfer_s)
        priced = price_pairwise_averaging(PAIRWISE, passive_peer, AHEAD, where)
        assert priced.seconds >= priced.bound_s * (1 - 1e-9)
        assert priced.bytes_per_link == pytest.approx(2 * ((hosts + 1) // 2) / hosts * MODEL_BYTES)


@pytest.mark.parametrize("transfer_s", [0.6, 1.5])
def test_some_hosts_represent_many(transfer_s):
    where = cluster(128, rate=MODEL_BYTES / transfer_s)
    all_hosts_s = find_steady_state(
        PAIRWISE, traffic_of_pairwise_averaging(where, passive_peer, AHEAD)
    ).period_s
    assert pairwise_s(where) == pytest.approx(all_hosts_s, rel=0.15)


def test_a_larger_lead_limit_absorbs_more_random_waiting():
    where = cluster(16, rate=MODEL_BYTES / 0.8)
    strict_s, relaxed_s = (
        price_pairwise_averaging(PAIRWISE, passive_peer, ahead, where).seconds
        for ahead in (1, AHEAD)
    )
    assert relaxed_s < 0.95 * strict_s


def in_groups(width: int, segments: int, delay: int) -> StepTimeline:
    """Return segments that a group sums inside, sends to peers in shards, and gathers inside."""
    exchanges = []
    share = (width - 1) / width
    for exchange in gossip(segments, delay).exchanges:
        reduced = replace(
            exchange,
            num_bytes=2 * share * exchange.num_bytes,
            due_s=BACKWARD_S,
            lane=9,
            inside=True,
        )
        shard = replace(exchange, num_bytes=exchange.num_bytes / width, follows=len(exchanges))
        gathered = replace(
            exchange,
            num_bytes=share * exchange.num_bytes,
            inside=True,
            follows=len(exchanges) + 1,
        )
        exchanges += [reduced, shard, gathered]
    return StepTimeline(STEP_S, tuple(exchanges))


@pytest.mark.parametrize("name", ["derangement", "one-peer-exponential"])
def test_groups_of_one_rank_cost_the_same_as_ranks(name):
    where = cluster(8, rate=0.8 * MODEL_BYTES)
    patterns = (
        pattern_of_topology(make_topology(name), 8),
        pattern_of_groups(make_topology(name), 8, 8),
    )
    one, other = (price_peer_exchanges(gossip(3, 0), pattern, where) for pattern in patterns)
    assert one == other


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_members_of_a_group_on_one_host_share_its_messages(times):
    """A host that is one group sends one model; without groups, each of its ranks sends one."""
    where = cluster(4, 4, rate=MODEL_BYTES / times)
    pattern = pattern_of_groups(make_topology("one-peer-exponential"), 4, 16)
    priced = price_peer_exchanges(in_groups(4, 3, 1), pattern, where)
    assert priced.bytes_per_link == pytest.approx(MODEL_BYTES)
    assert priced.seconds == pytest.approx(max(STEP_S, times), rel=0.05)


def test_groups_across_hosts_also_reduce_over_the_links():
    where = cluster(4, 1, rate=MODEL_BYTES)
    priced = price_peer_exchanges(
        in_groups(2, 1, 1), pattern_of_groups(make_topology("derangement"), 2, 4), where
    )
    # Around a group of two: the model. To a peer: a shard, half of it. Inside again: half of it.
    assert priced.bytes_per_link == pytest.approx(2 * MODEL_BYTES)
    assert priced.seconds >= 2 * STEP_S * (1 - 1e-9)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("hosts", "per_host", "groups"), [(4, 2, 4), (4, 4, 4), (8, 1, 4)])
def test_one_rank_represents_all_in_groups(hosts, per_host, groups, delay):
    where = cluster(hosts, per_host, rate=0.6 * MODEL_BYTES)
    size = hosts * per_host
    step_timeline = in_groups(size // groups, 4, delay)
    pattern = pattern_of_groups(make_topology("one-peer-exponential"), groups, size)
    representative_s = find_steady_state(
        step_timeline, traffic_of_representative(step_timeline, pattern, where)
    ).period_s
    every_rank_s = find_steady_state(step_timeline, traffic_of_every_rank(pattern, where)).period_s
    assert representative_s == pytest.approx(every_rank_s, rel=0.05)


def test_an_exchange_waits_for_the_one_that_it_follows():
    """If a reduction takes a whole step, the exchange that follows it is a step late."""
    reduced = Exchange(MODEL_BYTES, 0.0, STEP_S, lane=1, inside=True)
    sent = Exchange(MODEL_BYTES / 2, 0.0, 0.5, lane=0, follows=0)
    where = cluster(4, rate=MODEL_BYTES)
    pattern = pattern_of_groups(make_topology("one-peer-exponential"), 2, 4)
    both_s, sent_only_s = (
        price_peer_exchanges(StepTimeline(STEP_S, exchanges), pattern, where).seconds
        for exchanges in ((reduced, sent), (replace(sent, follows=None),))
    )
    assert sent_only_s == pytest.approx(STEP_S, rel=1e-2)
    assert both_s == pytest.approx(2 * STEP_S, rel=1e-2)

"""Prices of training steps: what holds of every topology, cluster and rhythm."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.comm.algorithms.table import parse_table
from stretto.sim.cluster import Cluster, Cpu, Transport
from stretto.sim.steps import (
    Exchange,
    Rhythm,
    of_groups,
    of_topology,
    price_sums,
    price_talks,
    price_visits,
)
from stretto.sim.steps.pace import find_pace
from stretto.sim.steps.talks import every_rank, stand_in
from stretto.sim.steps.visits import visits
from stretto.topology import TOPOLOGIES, named, passive_peer

MODEL_BYTES = 24_000_000
STEP_S, BACKWARD_S = 1.0, 0.6
DRAWN = {"derangement", "matching", "equidyn", "undirected-equidyn"}


def cluster(hosts: int, per_host: int = 1, *, rate: float = MODEL_BYTES, **cpu: float) -> Cluster:
    return Cluster(
        ranks_per_host=(per_host,) * hosts,
        between=Transport(latency_s=1e-4, bytes_per_s=rate),
        inside=Transport(latency_s=2e-5, bytes_per_s=100 * rate),
        cpu=Cpu(cores=4, **cpu),
    )


def gossip(segments: int, delay: int, *, every: int = 1) -> Rhythm:
    """Return equal segments that leave along backward, from the last layer to the first."""
    exchanges = []
    before_s = (every - 1) * STEP_S
    for index in range(segments):
        leaves_s = before_s + BACKWARD_S * (index + 1) / segments
        due_s = leaves_s + delay * every * STEP_S
        if not delay:
            forward_s = (STEP_S - BACKWARD_S) * (segments - 1 - index) / segments
            due_s = before_s + BACKWARD_S + forward_s
        number = segments - 1 - index
        exchanges.append(Exchange(MODEL_BYTES / segments, leaves_s, due_s, index % 8, number))
    return Rhythm(every * STEP_S, tuple(exchanges), every)


def sums(buckets: int) -> Rhythm:
    """Return equal buckets that leave along backward and are due at its end."""
    places = ((index + 1) / buckets * BACKWARD_S for index in range(buckets))
    return Rhythm(STEP_S, tuple(Exchange(MODEL_BYTES / buckets, at, BACKWARD_S) for at in places))


def possible(sizes: list[int]) -> list[tuple[str, int]]:
    pairs = itertools.product(TOPOLOGIES, sizes)
    return [(name, size) for name, size in pairs if named(name).refuses(size) is None]


@pytest.mark.parametrize(("name", "size"), possible([1]))
def test_one_rank_takes_as_long_as_it_computes(name, size):
    priced = price_talks(gossip(4, 1), of_topology(named(name), size), cluster(size))
    assert priced.seconds == priced.compute_s == priced.bound_s == STEP_S
    assert (priced.bytes_per_link, priced.exposed_s, priced.efficiency) == (0, 0, 1)
    assert priced.held_up_by == "computation"


def test_one_rank_has_nothing_to_sum():
    priced = price_sums(sums(4), parse_table("ring"), cluster(1))
    assert priced.seconds == pytest.approx(STEP_S)
    assert (priced.exposed_s, priced.bytes_per_link) == (0, 0)


@pytest.mark.parametrize(("name", "size"), possible([2, 6, 8]))
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_no_step_is_below_its_bound(name, size, delay):
    for per_host, rate in itertools.product((1, 2), (0.3, 1, 5)):
        there = cluster(size // per_host, per_host, rate=rate * MODEL_BYTES, s_per_message=3e-5)
        priced = price_talks(gossip(3, delay), of_topology(named(name), size), there)
        assert priced.seconds >= priced.bound_s * (1 - 1e-9)
        assert priced.bound_s >= priced.compute_s == STEP_S


@pytest.mark.parametrize("table", ["ring", "doubling", "hierarchical", "native", "torus/2"])
def test_no_step_of_sums_is_below_its_bound(table):
    for hosts, per_host, rate in itertools.product((2, 4), (1, 2), (0.3, 1, 5)):
        there = cluster(hosts, per_host, rate=rate * MODEL_BYTES)
        priced = price_sums(sums(5), parse_table(table), there)
        assert priced.seconds >= priced.bound_s * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["derangement", "one-peer-exponential", "ring", "static-exponential"]),
    hosts=st.integers(2, 6),
    segments=st.integers(1, 5),
    delay=st.integers(0, 3),
    rates=st.tuples(st.floats(0.1, 10), st.floats(1.0, 8.0)),
)
def test_more_rate_is_never_slower(name, hosts, segments, delay, rates):
    slow, faster = rates
    seconds = [
        price_talks(
            gossip(segments, delay), of_topology(named(name), hosts), cluster(hosts, rate=rate)
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
def test_more_rate_never_slows_sums(table, shape, buckets, rates):
    slow, faster = rates
    seconds = [
        price_sums(sums(buckets), parse_table(table), cluster(*shape, rate=rate)).seconds
        for rate in (slow * MODEL_BYTES, slow * faster * MODEL_BYTES)
    ]
    assert seconds[1] <= seconds[0] * (1 + 1e-9)


@pytest.mark.parametrize("times", [0.25, 0.5, 0.9, 1.1, 2, 8])
@pytest.mark.parametrize("segments", [1, 4])
def test_with_a_delay_a_step_is_computation_or_bytes_whichever_is_longer(times, segments):
    """``times``: how many steps of computation it takes to send the model."""
    there = cluster(8, rate=MODEL_BYTES / times)
    priced = price_talks(gossip(segments, 1), of_topology(named("derangement"), 8), there)
    assert priced.seconds == pytest.approx(max(STEP_S, times), rel=2e-3)
    assert priced.bytes_per_link == pytest.approx(MODEL_BYTES)


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, size in possible([5, 8]) if name not in DRAWN]
)
def test_who_may_be_later_is_never_slower(name, size):
    there = cluster(size, rate=0.8 * MODEL_BYTES)
    talk = of_topology(named(name), size)
    seconds = [price_talks(gossip(3, d), talk, there).seconds for d in range(4)]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(seconds))


@pytest.mark.parametrize(("name", "size"), possible([2, 6, 8]))
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_one_rank_stands_for_all_where_each_is_a_host(name, size, delay):
    """By symmetry, where all have as many peers; `matching` of an odd number is none of these."""
    rhythm, there = gossip(4, delay), cluster(size, rate=0.7 * MODEL_BYTES, s_per_byte_between=1e-9)
    talk = of_topology(named(name), there.mesh.size)
    alone = find_pace(rhythm, stand_in(rhythm, talk, there)).period_s
    followed = find_pace(rhythm, every_rank(talk, there)).period_s
    assert alone == pytest.approx(followed, rel=0.08 if name in DRAWN else 1e-5)


@pytest.mark.parametrize("name", ["derangement", "one-peer-exponential", "base", "ring"])
@pytest.mark.parametrize(("hosts", "per_host"), [(4, 2), (4, 4)])
@pytest.mark.parametrize(("segments", "delay"), [(1, 0), (6, 0), (6, 1)])
def test_one_rank_stands_for_all_where_hosts_have_several(name, hosts, per_host, segments, delay):
    rhythm = gossip(segments, delay)
    there = cluster(hosts, per_host, rate=0.6 * per_host * MODEL_BYTES)
    talk = of_topology(named(name), there.mesh.size)
    alone = find_pace(rhythm, stand_in(rhythm, talk, there)).period_s
    followed = find_pace(rhythm, every_rank(talk, there)).period_s
    assert alone == pytest.approx(followed, rel=0.08 if name in DRAWN else 0.03)


@pytest.mark.parametrize(
    ("name", "size"), [*possible([1024]), ("derangement", 10_000), ("one-peer-exponential", 10_000)]
)
def test_thousands_of_ranks_have_a_price(name, size):
    talk = of_topology(named(name), size)
    priced = price_talks(gossip(8, 1), talk, cluster(size // 8, 8, rate=MODEL_BYTES))
    assert priced.seconds >= priced.bound_s * (1 - 1e-9)
    assert priced.bound_s > STEP_S


VISITING = Rhythm(STEP_S, (Exchange(MODEL_BYTES, BACKWARD_S, BACKWARD_S + STEP_S),))
AHEAD = 8


def visited(there: Cluster) -> float:
    return price_visits(VISITING, passive_peer, AHEAD, there).seconds


def test_one_rank_visits_nobody():
    priced = price_visits(VISITING, passive_peer, AHEAD, cluster(1))
    assert (priced.seconds, priced.bytes_per_link) == (STEP_S, 0)


@pytest.mark.parametrize("slower", [0.1, 0.9, 1.5, 4.0])
def test_of_two_the_one_that_visits_waits_for_the_link_or_nobody_waits(slower):
    there = cluster(2, rate=MODEL_BYTES / slower)
    assert visited(there) == pytest.approx(max(STEP_S, slower + 3 * there.between.latency_s))


def test_whoever_visits_the_same_rank_waits_for_the_other():
    """Of three ranks two visit one."""
    assert visited(cluster(3, rate=MODEL_BYTES / 0.7)) == pytest.approx(1.4, rel=1e-2)
    assert visited(cluster(3, rate=MODEL_BYTES / 0.3)) == pytest.approx(STEP_S, rel=1e-6)


@pytest.mark.parametrize("hosts", [4, 7, 16])
def test_no_visit_is_faster_than_the_link_and_every_visitor_sends_a_model(hosts):
    for slower in (0.5, 1.0, 3.0):
        there = cluster(hosts, rate=MODEL_BYTES / slower)
        priced = price_visits(VISITING, passive_peer, AHEAD, there)
        assert priced.seconds >= priced.bound_s * (1 - 1e-9)
        assert priced.bytes_per_link == pytest.approx(2 * ((hosts + 1) // 2) / hosts * MODEL_BYTES)


@pytest.mark.parametrize("slower", [0.6, 1.5])
def test_some_hosts_stand_for_many(slower):
    there = cluster(128, rate=MODEL_BYTES / slower)
    all_of_them = find_pace(VISITING, visits(there, passive_peer, AHEAD)).period_s
    assert visited(there) == pytest.approx(all_of_them, rel=0.15)


def test_ranks_that_may_run_further_apart_wait_less_for_bad_luck():
    there = cluster(16, rate=MODEL_BYTES / 0.8)
    tied, loose = (
        price_visits(VISITING, passive_peer, ahead, there).seconds for ahead in (1, AHEAD)
    )
    assert loose < 0.95 * tied


def in_groups(width: int, segments: int, delay: int) -> Rhythm:
    """Return segments that are summed inside groups, told in shards, and put together inside."""
    exchanges = []
    share = (width - 1) / width
    for talk in gossip(segments, delay).exchanges:
        summed = replace(
            talk, num_bytes=2 * share * talk.num_bytes, due_s=BACKWARD_S, lane=9, inside=True
        )
        shard = replace(talk, num_bytes=talk.num_bytes / width, follows=len(exchanges))
        together = replace(
            talk, num_bytes=share * talk.num_bytes, inside=True, follows=len(exchanges) + 1
        )
        exchanges += [summed, shard, together]
    return Rhythm(STEP_S, tuple(exchanges))


@pytest.mark.parametrize("name", ["derangement", "one-peer-exponential"])
def test_groups_of_one_are_ranks(name):
    there = cluster(8, rate=0.8 * MODEL_BYTES)
    talks = of_topology(named(name), 8), of_groups(named(name), 8, 8)
    one, other = (price_talks(gossip(3, 0), talk, there) for talk in talks)
    assert one == other


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_members_of_a_group_on_one_host_share_what_it_tells(times):
    """A host tells a model, however many ranks it has; flat, each of its ranks tells one."""
    there = cluster(4, 4, rate=MODEL_BYTES / times)
    talk = of_groups(named("one-peer-exponential"), 4, 16)
    priced = price_talks(in_groups(4, 3, 1), talk, there)
    assert priced.bytes_per_link == pytest.approx(MODEL_BYTES)
    assert priced.seconds == pytest.approx(max(STEP_S, times), rel=0.05)


def test_groups_across_hosts_sum_on_the_links():
    there = cluster(4, 1, rate=MODEL_BYTES)
    priced = price_talks(in_groups(2, 1, 1), of_groups(named("derangement"), 2, 4), there)
    # Round a group of two, the model; a shard, half of it, to a peer; half of it inside again.
    assert priced.bytes_per_link == pytest.approx(2 * MODEL_BYTES)
    assert priced.seconds >= 2 * STEP_S * (1 - 1e-9)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("hosts", "per_host", "groups"), [(4, 2, 4), (4, 4, 4), (8, 1, 4)])
def test_one_rank_stands_for_all_in_groups(hosts, per_host, groups, delay):
    there = cluster(hosts, per_host, rate=0.6 * MODEL_BYTES)
    size = hosts * per_host
    rhythm = in_groups(size // groups, 4, delay)
    talk = of_groups(named("one-peer-exponential"), groups, size)
    alone = find_pace(rhythm, stand_in(rhythm, talk, there)).period_s
    followed = find_pace(rhythm, every_rank(talk, there)).period_s
    assert alone == pytest.approx(followed, rel=0.05)


def test_what_follows_waits_for_what_it_follows():
    """A sum that takes a step is told a step late, and what is due at once waits for both."""
    summed = Exchange(MODEL_BYTES, 0.0, STEP_S, lane=1, inside=True)
    told = Exchange(MODEL_BYTES / 2, 0.0, 0.5, lane=0, follows=0)
    there = cluster(4, rate=MODEL_BYTES)
    talk = of_groups(named("one-peer-exponential"), 2, 4)
    both, alone = (
        price_talks(Rhythm(STEP_S, exchanges), talk, there).seconds
        for exchanges in ((summed, told), (replace(told, follows=None),))
    )
    assert alone == pytest.approx(STEP_S, rel=1e-2)
    assert both == pytest.approx(2 * STEP_S, rel=1e-2)

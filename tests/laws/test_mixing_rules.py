"""Properties of every topology in the table, at every size that it allows."""

import random
from collections import Counter
from importlib import import_module

import networkx as nx
import numpy as np
import pytest

from stretto.topology import TOPOLOGIES, RoundPeers, TopologySettings, grouped, make_topology
from stretto.topology import keyed_random as keyed
from stretto.topology.analysis import (
    MessageCounts,
    analyze_topology,
    is_column_stochastic,
    is_doubly_stochastic,
    message_counts,
    mixing_matrix,
    rounds_to_consensus,
    topology_from_graph,
)

SIZES = [*range(1, 18), 32, 64]
DRAWN = [name for name, entry in TOPOLOGIES.items() if "seed" in entry.used_settings]
ONE_PEER = ["one-peer-exponential", "derangement", "equidyn"]
"""Each rank sends to exactly one rank and receives from exactly one."""
PAIRS = ["hypercube", "matching", "undirected-equidyn"]
"""Each rank exchanges with one rank or with none."""


def variants():
    """Yield every topology of the table with one to three peers, and between groups."""
    for name, entry in TOPOLOGIES.items():
        for k in (1, 2, 3) if "peers" in entry.used_settings else (1,):
            yield (
                f"{name}-k{k}" if k > 1 else name,
                make_topology(name, TopologySettings(peers=k, seed=7)),
            )
        yield f"{name}-groups", make_topology(name, TopologySettings(groups=4, seed=7))


VARIANTS = dict(variants())
for_every_topology = pytest.mark.parametrize("topology", VARIANTS.values(), ids=VARIANTS.keys())
for_every_name = pytest.mark.parametrize("name", TOPOLOGIES)


def allowed(topology, sizes=SIZES):
    return [size for size in sizes if topology.size_error(size) is None]


def rounds(topology, size):
    """Yield (step, segment) of a whole period, or of three steps of random peers."""
    for step in range(topology.period(size) or 3):
        yield from ((step, segment) for segment in (0, 5))


def everybody(topology, size, step, segment=0):
    return [topology(rank, size, step, segment) for rank in range(size)]


def total(self_weight, edges):
    return self_weight + sum(edge.weight for edge in edges)


@for_every_topology
def test_sender_and_receiver_have_the_same_weight_of_an_edge(topology):
    for size in allowed(topology):
        for step, segment in rounds(topology, size):
            peers = everybody(topology, size, step, segment)
            sent = [(r, e.rank, e.weight) for r, each in enumerate(peers) for e in each.sends]
            received = [
                (e.rank, r, e.weight) for r, each in enumerate(peers) for e in each.receives
            ]
            assert sorted(sent) == sorted(received)


@for_every_topology
def test_peers_are_other_ranks_without_repetition(topology):
    for size in allowed(topology):
        for step, segment in rounds(topology, size):
            for rank, peers in enumerate(everybody(topology, size, step, segment)):
                for edges in (peers.sends, peers.receives):
                    ranks = [edge.rank for edge in edges]
                    assert len({*ranks, rank} & set(range(size))) == len(ranks) + 1
                    assert all(0 < edge.weight < 1 for edge in edges)


@for_every_topology
def test_rows_and_columns_sum_to_one(topology):
    assert topology.doubly_stochastic
    for size in allowed(topology):
        for step, segment in rounds(topology, size):
            for peers in everybody(topology, size, step, segment):
                assert peers.self_weight >= 0
                assert total(peers.self_weight, peers.sends) == pytest.approx(1, abs=1e-14)
                assert total(peers.self_weight, peers.receives) == pytest.approx(1, abs=1e-14)


@for_every_topology
def test_the_mean_is_preserved(topology):
    for size in allowed(topology):
        values = np.random.default_rng(size).normal(size=(size, 3))
        mixed = values
        for step, segment in rounds(topology, size):
            mixed = mixing_matrix(topology, size, step, segment) @ mixed
        np.testing.assert_allclose(mixed.mean(axis=0), values.mean(axis=0), rtol=0, atol=1e-12)


ALONE = {name: one for name, one in VARIANTS.items() if one.size_error(1) is None}
PERIODIC = {
    name: one for name, one in VARIANTS.items() if any(map(one.period, allowed(one, range(2, 18))))
}


def test_topologies_of_one_rank_and_periodic_ones_are_found():
    assert ALONE.keys() == {name for name in VARIANTS if not name.endswith("-groups")}
    drawn = {name for name in VARIANTS if name.split("-k")[0].removesuffix("-groups") in DRAWN}
    assert PERIODIC.keys() == VARIANTS.keys() - drawn
    assert len(PERIODIC) >= 15


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_has_no_peers(name):
    assert ALONE[name](0, 1, 3, 2) == RoundPeers(1.0)


def periods(topology, sizes):
    """Return (size, period) of the allowed sizes at which peers repeat; there is at least one."""
    found = [(size, topology.period(size)) for size in allowed(topology, sizes)]
    repeating = [(size, period) for size, period in found if period]
    assert repeating
    return repeating


@pytest.mark.parametrize("name", PERIODIC)
def test_peers_repeat_after_a_period(name):
    topology = PERIODIC[name]
    for size, period in periods(topology, range(1, 18)):
        for step in range(period):
            now, later = (everybody(topology, size, s) for s in (step, step + 3 * period))
            assert now == later


@pytest.mark.parametrize("name", PERIODIC)
def test_only_random_peers_depend_on_the_segment(name):
    topology = PERIODIC[name]
    for size, period in periods(topology, [2, 5, 8, 12]):
        for step in range(period):
            assert everybody(topology, size, step, 0) == everybody(topology, size, step, 3)


@for_every_topology
def test_the_report_agrees_with_the_declared_properties(topology):
    for size in allowed(topology, [4, 8, 12]):
        report = analyze_topology(topology, size)
        assert report.doubly_stochastic == topology.doubly_stochastic
        assert 0 < report.spectral_gap <= 1
        if report.rounds_to_consensus is not None and report.period is not None:
            assert report.spectral_gap == pytest.approx(1)


# Messages.


@pytest.mark.parametrize("name", ONE_PEER)
def test_each_rank_sends_and_receives_each_segment_once(name):
    topology = make_topology(name)
    for size in SIZES[1:]:
        for step, segment in rounds(topology, size):
            assert message_counts(topology, size, step, segment) == [MessageCounts(1, 1)] * size


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_exchange_in_both_directions(name):
    topology = make_topology(name)
    for size in allowed(topology):
        for step, segment in rounds(topology, size):
            for peers in everybody(topology, size, step, segment):
                assert peers.sends == peers.receives
                assert len(peers.sends) <= 1


def test_a_matching_leaves_one_rank_unpaired_if_the_number_is_odd():
    for size in SIZES:
        unpaired = [p for p in everybody(make_topology("matching"), size, 4) if not p.sends]
        assert len(unpaired) == size % 2


@pytest.mark.parametrize("name", ["hyper-hypercube", "simple-base", "base"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_rank_has_more_than_k_peers(name, k):
    topology = make_topology(name, TopologySettings(peers=k))
    for size in allowed(topology):
        for step, _ in rounds(topology, size):
            assert max(max(each) for each in message_counts(topology, size, step)) <= k


def test_a_derangement_is_one_cycle_through_all_ranks():
    topology = make_topology("derangement", TopologySettings(seed=3))
    for size in SIZES[1:]:
        for step, segment in rounds(topology, size):
            sender_of = [p.receives[0].rank for p in everybody(topology, size, step, segment)]
            seen, rank = [0], sender_of[0]
            while rank != 0:
                seen.append(rank)
                rank = sender_of[rank]
            assert sorted(seen) == list(range(size))


# Random peers.


def clear_draw_caches():
    """Clear every cache of draws: a cached draw would hide a dependence on the order."""
    for name in ("keyed_random", "graphs"):
        for function in vars(import_module(f"stretto.topology.{name}")).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@pytest.mark.parametrize("name", DRAWN)
def test_a_draw_depends_on_seed_step_and_segment_only(name):
    asked = [(rank, step, segment) for rank in range(9) for step in range(40) for segment in (0, 1)]
    first = {
        key: make_topology(name, TopologySettings(seed=11))(key[0], 9, *key[1:]) for key in asked
    }
    random.Random(0).shuffle(asked)
    clear_draw_caches()
    topology = make_topology(name, TopologySettings(seed=11))
    assert all(topology(rank, 9, step, seg) == first[rank, step, seg] for rank, step, seg in asked)


@pytest.mark.parametrize("name", DRAWN)
def test_seed_step_and_segment_each_change_the_draw(name):
    def drawn(seed, step, segment):
        return tuple(everybody(make_topology(name, TopologySettings(seed=seed)), 17, step, segment))

    for vary in (lambda i: (i, 0, 0), lambda i: (0, i, 0), lambda i: (0, 0, i)):
        # EquiDyn has only 16 distances, so some of twenty draws must be equal.
        assert len({drawn(*vary(i)) for i in range(20)}) >= 8
    assert drawn(0, 1, 2) != drawn(0, 2, 1)


@pytest.mark.parametrize("vary", ["seed", "step", "segment"])
@pytest.mark.parametrize("name", ["derangement", "matching", "equidyn"])
def test_all_peers_are_equally_likely(name, vary):
    size, draws = 6, 5000
    frequency = np.zeros((size, size))
    for i in range(draws):
        at = {"seed": 5, "step": 6, "segment": 7, vary: i}
        topology = make_topology(name, TopologySettings(seed=at["seed"]))
        for rank, peers in enumerate(everybody(topology, size, at["step"], at["segment"])):
            frequency[rank, peers.receives[0].rank] += 1 / draws
    others = ~np.eye(size, dtype=bool)
    spread = np.sqrt(0.2 * 0.8 / draws)
    assert np.abs(frequency[others] - 0.2).max() < 4 * spread
    assert not frequency[~others].any()


def test_all_cycles_are_equally_likely():
    draws = 12000
    found = Counter(keyed.random_cycle(5, 1, step, 0) for step in range(draws))
    expected = draws / 24
    chi_square = sum((n - expected) ** 2 / expected for n in found.values())
    assert len(found) == 24
    assert chi_square < 23 + 4 * np.sqrt(2 * 23)


@pytest.mark.parametrize("later", [(1, 0), (0, 1)], ids=["step", "segment"])
def test_consecutive_draws_are_independent(later):
    draws = 10000
    pairs = Counter(
        (keyed.random_cycle(6, 2, i, i)[0], keyed.random_cycle(6, 2, i + later[0], i + later[1])[0])
        for i in range(draws)
    )
    expected = draws / 25
    assert sum((n - expected) ** 2 / expected for n in pairs.values()) < 24 + 4 * np.sqrt(2 * 24)


# Consensus.


def is_mean_after_one_period(topology, size):
    product = np.eye(size)
    for step in range(topology.period(size)):
        product = mixing_matrix(topology, size, step) @ product
    return np.abs(product - 1 / size).max() < 1e-14


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["simple-base", "base"])
def test_base_graphs_are_exact_after_one_period_for_any_number_of_ranks(name, k):
    topology = make_topology(name, TopologySettings(peers=k))
    assert all(is_mean_after_one_period(topology, size) for size in range(1, 65))


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_hyper_hypercubes_are_exact_after_one_period_at_allowed_sizes(k):
    topology = make_topology("hyper-hypercube", TopologySettings(peers=k))
    assert all(is_mean_after_one_period(topology, size) for size in allowed(topology, range(1, 65)))


@pytest.mark.parametrize("name", ["one-peer-exponential", "hypercube", "complete"])
def test_powers_of_two_are_exact_after_one_period(name):
    for log_size in range(7):
        assert is_mean_after_one_period(make_topology(name), 1 << log_size)


@pytest.mark.parametrize("name", ["one-peer-exponential", "hypercube"])
def test_powers_of_two_are_exact_from_any_first_step(name):
    topology = make_topology(name)
    for first in range(1, 5):
        product = np.eye(16)
        for step in range(first, first + 4):
            product = mixing_matrix(topology, 16, step) @ product
        assert np.abs(product - 1 / 16).max() < 1e-14


def test_one_peer_exponential_is_exact_at_no_other_size():
    sizes = [size for size in range(3, 65) if size & (size - 1)]
    assert {rounds_to_consensus(make_topology("one-peer-exponential"), size) for size in sizes} == {
        None
    }


def distance_from_mean(topology, size, steps):
    values = np.random.default_rng(1).normal(size=size)
    values -= values.mean()
    mixed = values
    for step in range(steps):
        mixed = mixing_matrix(topology, size, step) @ mixed
    return np.linalg.norm(mixed) / np.linalg.norm(values)


@for_every_topology
def test_every_topology_reaches_consensus(topology):
    for size in allowed(topology, [2, 3, 5, 8, 12]):
        assert distance_from_mean(topology, size, 250) < 1e-6


# Push-sum, for matrices whose columns only sum to 1.


def irregular(size, seed):
    """Return a directed cycle, so that the graph is connected, with some random edges."""
    graph = nx.gnp_random_graph(size, 0.2, seed=seed, directed=True)
    nx.add_cycle(graph, range(size))
    return graph


@pytest.mark.parametrize("size", [3, 8, 17])
def test_push_sum_finds_the_mean_where_only_columns_sum_to_one(size):
    topology = topology_from_graph(irregular(size, seed=size))
    dense = mixing_matrix(topology, size)
    assert is_column_stochastic(dense)
    assert not is_doubly_stochastic(dense)
    assert not topology.doubly_stochastic
    values, weights = np.random.default_rng(size).normal(size=size), np.ones(size)
    mean = values.mean()
    for _ in range(400):
        values, weights = dense @ values, dense @ weights
    np.testing.assert_allclose(values / weights, mean, rtol=0, atol=1e-12)
    assert weights.sum() == pytest.approx(size)
    assert np.abs(values - mean).max() > 1e-3, "without the weights it is not the mean"


@for_every_name
def test_push_sum_weights_stay_one_where_rows_sum_to_one_too(name):
    topology = make_topology(name)
    for size in allowed(topology, [5, 8]):
        weights = np.ones(size)
        for step, segment in rounds(topology, size):
            weights = mixing_matrix(topology, size, step, segment) @ weights
        np.testing.assert_allclose(weights, 1, rtol=0, atol=1e-12)


# Groups.


@for_every_name
def test_one_group_is_the_mean_of_all(name):
    topology = make_topology(name, TopologySettings(groups=1))
    for size in SIZES:
        one_group = mixing_matrix(topology, size)
        np.testing.assert_allclose(
            one_group, mixing_matrix(make_topology("complete"), size), rtol=0, atol=1e-15
        )


@for_every_name
def test_as_many_groups_as_ranks_are_the_topology_itself(name):
    flat = make_topology(name)
    for size in allowed(flat):
        lifted = grouped(flat, size)
        for step, segment in rounds(flat, size):
            assert everybody(lifted, size, step, segment) == everybody(flat, size, step, segment)


@for_every_name
def test_groups_average_exactly_and_mix_as_single_ranks_would(name):
    topology = make_topology(name, TopologySettings(groups=4))
    for step in range(3):
        dense = mixing_matrix(topology, 12, step)
        expected = np.kron(mixing_matrix(make_topology(name), 4, step), np.full((3, 3), 1 / 3))
        np.testing.assert_allclose(dense, expected, rtol=0, atol=1e-15)


# Steady state: every round adds noise of variance 1 to each value, and mixes.


def steady_disagreement(topology, size, steps=400, coordinates=500):
    """Return the variance of the ranks around their mean, after mixing."""
    generator = np.random.default_rng(size)
    values, seen = np.zeros((size, coordinates)), []
    for step in range(steps):
        values = mixing_matrix(topology, size, step) @ (
            values + generator.normal(size=values.shape)
        )
        values -= values.mean(axis=0)
        seen.append(np.square(values).mean())
    return np.mean(seen[50:])


def derangement_form(n):
    return (n - 1) * (n - 2) / n**2


def exponential_form(n):
    return 1 - (1 + np.log2(n)) / n


def equidyn_form(n):
    # A round leaves (n-1)/2n of the squared disagreement, the same in every direction.
    return (n - 1) ** 2 / (n * (n + 1))


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("derangement", derangement_form),
        ("one-peer-exponential", exponential_form),
        ("base", exponential_form),
        ("equidyn", equidyn_form),
    ],
)
def test_disagreement_under_noise_agrees_with_the_closed_form(name, form, size):
    assert steady_disagreement(make_topology(name), size) == pytest.approx(form(size), rel=0.05)


def test_disagreement_of_groups_is_that_of_as_many_ranks_with_less_noise():
    # Three ranks of a group average their noise, which leaves a third of its variance.
    found = steady_disagreement(grouped(make_topology("derangement"), 8), 24, coordinates=1500)
    assert found == pytest.approx(derangement_form(8) / 3, rel=0.05)

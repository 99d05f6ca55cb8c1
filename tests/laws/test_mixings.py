"""What holds of every topology in the table, at every size that it allows."""

import random
from collections import Counter
from importlib import import_module

import networkx as nx
import numpy as np
import pytest

from stretto.topology import TOPOLOGIES, Peers, Settings, grouped, keyed, named
from stretto.topology.analysis import (
    Counts,
    counts,
    is_column_stochastic,
    is_doubly_stochastic,
    matrix,
    report,
    rounds_to_consensus,
)
from stretto.topology.custom import of_graph

SIZES = [*range(1, 18), 32, 64]
DRAWN = [name for name, entry in TOPOLOGIES.items() if "seed" in entry.reads]
ONE_PEER = ["one-peer-exponential", "derangement", "equidyn"]
"""A rank tells exactly one and hears exactly one."""
PAIRS = ["hypercube", "matching", "undirected-equidyn"]
"""A rank talks to one, or to nobody."""


def variants():
    """Yield every row of the table with each setting that changes its shape, and over groups."""
    for name, entry in TOPOLOGIES.items():
        for k in (1, 2, 3) if "peers" in entry.reads else (1,):
            yield f"{name}-k{k}" if k > 1 else name, named(name, Settings(peers=k, seed=7))
        yield f"{name}-groups", named(name, Settings(groups=4, seed=7))


VARIANTS = dict(variants())
for_every_topology = pytest.mark.parametrize("topology", VARIANTS.values(), ids=VARIANTS.keys())
for_every_name = pytest.mark.parametrize("name", TOPOLOGIES)


def allowed(topology, sizes=SIZES):
    return [size for size in sizes if topology.refuses(size) is None]


def rounds(topology, size):
    """Yield (step, segment) of a whole period, or of some draws."""
    for step in range(topology.period(size) or 3):
        yield from ((step, segment) for segment in (0, 5))


def everybody(topology, size, step, segment=0):
    return [topology(rank, size, step, segment) for rank in range(size)]


def total(own, edges):
    return own + sum(edge.weight for edge in edges)


@for_every_topology
def test_both_ends_of_an_edge_know_it_by_the_same_weight(topology):
    for size in allowed(topology):
        for step, segment in rounds(topology, size):
            peers = everybody(topology, size, step, segment)
            told = [(r, e.rank, e.weight) for r, each in enumerate(peers) for e in each.sends]
            heard = [(e.rank, r, e.weight) for r, each in enumerate(peers) for e in each.receives]
            assert sorted(told) == sorted(heard)


@for_every_topology
def test_peers_are_others_and_each_is_met_once(topology):
    for size in allowed(topology):
        for step, segment in rounds(topology, size):
            for rank, peers in enumerate(everybody(topology, size, step, segment)):
                for edges in (peers.sends, peers.receives):
                    ranks = [edge.rank for edge in edges]
                    assert len({*ranks, rank} & set(range(size))) == len(ranks) + 1
                    assert all(0 < edge.weight < 1 for edge in edges)


@for_every_topology
def test_shares_sum_to_one_and_so_does_what_is_heard(topology):
    assert topology.doubly_stochastic
    for size in allowed(topology):
        for step, segment in rounds(topology, size):
            for peers in everybody(topology, size, step, segment):
                assert peers.own >= 0
                assert total(peers.own, peers.sends) == pytest.approx(1, abs=1e-14)
                assert total(peers.own, peers.receives) == pytest.approx(1, abs=1e-14)


@for_every_topology
def test_the_mean_does_not_move(topology):
    for size in allowed(topology):
        values = np.random.default_rng(size).normal(size=(size, 3))
        mixed = values
        for step, segment in rounds(topology, size):
            mixed = matrix(topology, size, step, segment) @ mixed
        np.testing.assert_allclose(mixed.mean(axis=0), values.mean(axis=0), rtol=0, atol=1e-12)


@for_every_topology
def test_one_rank_has_nobody_to_talk_to(topology):
    if topology.refuses(1) is None:
        assert topology(0, 1, 3, 2) == Peers(1.0)


@for_every_topology
def test_peers_repeat_after_a_period(topology):
    for size in allowed(topology, range(1, 18)):
        if period := topology.period(size):
            for step in range(period):
                now, later = (everybody(topology, size, s) for s in (step, step + 3 * period))
                assert now == later


@for_every_topology
def test_only_drawn_peers_depend_on_the_segment(topology):
    for size in allowed(topology, [2, 5, 8, 12]):
        for step in range(topology.period(size) or 0):
            assert everybody(topology, size, step, 0) == everybody(topology, size, step, 3)


@for_every_topology
def test_what_is_reported_is_what_was_claimed(topology):
    for size in allowed(topology, [4, 8, 12]):
        told = report(topology, size)
        assert told.doubly_stochastic == topology.doubly_stochastic
        assert 0 < told.spectral_gap <= 1
        if told.rounds_to_consensus is not None and told.period is not None:
            assert told.spectral_gap == pytest.approx(1)


# Messages.


@pytest.mark.parametrize("name", ONE_PEER)
def test_each_segment_leaves_once_and_arrives_once(name):
    topology = named(name)
    for size in SIZES[1:]:
        for step, segment in rounds(topology, size):
            assert counts(topology, size, step, segment) == [Counts(1, 1)] * size


@pytest.mark.parametrize("name", PAIRS)
def test_in_pairs_each_hears_whom_it_tells(name):
    topology = named(name)
    for size in allowed(topology):
        for step, segment in rounds(topology, size):
            for peers in everybody(topology, size, step, segment):
                assert peers.sends == peers.receives
                assert len(peers.sends) <= 1


def test_of_a_matching_one_stays_alone_where_the_number_is_odd_and_nobody_else():
    for size in SIZES:
        alone = [p for p in everybody(named("matching"), size, 4) if not p.sends]
        assert len(alone) == size % 2


@pytest.mark.parametrize("name", ["hyper-hypercube", "simple-base", "base"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_nobody_has_more_than_k_peers(name, k):
    topology = named(name, Settings(peers=k))
    for size in allowed(topology):
        for step, _ in rounds(topology, size):
            assert max(max(each) for each in counts(topology, size, step)) <= k


def test_a_derangement_is_one_circle_through_all_ranks():
    topology = named("derangement", Settings(seed=3))
    for size in SIZES[1:]:
        for step, segment in rounds(topology, size):
            heard = [p.receives[0].rank for p in everybody(topology, size, step, segment)]
            seen, rank = [0], heard[0]
            while rank != 0:
                seen.append(rank)
                rank = heard[rank]
            assert sorted(seen) == list(range(size))


# Draws.


def forget_draws():
    """Empty every cache of draws: what is remembered would hide what depends on the order."""
    for name in ("keyed", "random_peers", "equidyn"):
        for function in vars(import_module(f"stretto.topology.{name}")).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@pytest.mark.parametrize("name", DRAWN)
def test_a_draw_follows_from_seed_step_and_segment_whatever_was_asked_before(name):
    asked = [(rank, step, segment) for rank in range(9) for step in range(40) for segment in (0, 1)]
    first = {key: named(name, Settings(seed=11))(key[0], 9, *key[1:]) for key in asked}
    random.Random(0).shuffle(asked)
    forget_draws()
    topology = named(name, Settings(seed=11))
    assert all(topology(rank, 9, step, seg) == first[rank, step, seg] for rank, step, seg in asked)


@pytest.mark.parametrize("name", DRAWN)
def test_seed_step_and_segment_each_change_the_draw(name):
    def drawn(seed, step, segment):
        return tuple(everybody(named(name, Settings(seed=seed)), 17, step, segment))

    for vary in (lambda i: (i, 0, 0), lambda i: (0, i, 0), lambda i: (0, 0, i)):
        # EquiDyn has only 16 distances: some of twenty draws are bound to agree.
        assert len({drawn(*vary(i)) for i in range(20)}) >= 8
    assert drawn(0, 1, 2) != drawn(0, 2, 1)


@pytest.mark.parametrize("vary", ["seed", "step", "segment"])
@pytest.mark.parametrize("name", ["derangement", "matching", "equidyn"])
def test_every_peer_is_as_likely_as_any_other(name, vary):
    size, draws = 6, 5000
    heard = np.zeros((size, size))
    for i in range(draws):
        at = {"seed": 5, "step": 6, "segment": 7, vary: i}
        topology = named(name, Settings(seed=at["seed"]))
        for rank, peers in enumerate(everybody(topology, size, at["step"], at["segment"])):
            heard[rank, peers.receives[0].rank] += 1 / draws
    others = ~np.eye(size, dtype=bool)
    spread = np.sqrt(0.2 * 0.8 / draws)
    assert np.abs(heard[others] - 0.2).max() < 4 * spread
    assert not heard[~others].any()


def test_every_circle_is_as_likely_as_any_other():
    draws = 12000
    found = Counter(keyed.cycle(5, 1, step, 0) for step in range(draws))
    expected = draws / 24
    chi_square = sum((n - expected) ** 2 / expected for n in found.values())
    assert len(found) == 24
    assert chi_square < 23 + 4 * np.sqrt(2 * 23)


@pytest.mark.parametrize("later", [(1, 0), (0, 1)], ids=["step", "segment"])
def test_the_next_draw_is_not_foretold_by_this_one(later):
    draws = 10000
    pairs = Counter(
        (keyed.cycle(6, 2, i, i)[0], keyed.cycle(6, 2, i + later[0], i + later[1])[0])
        for i in range(draws)
    )
    expected = draws / 25
    assert sum((n - expected) ** 2 / expected for n in pairs.values()) < 24 + 4 * np.sqrt(2 * 24)


# Consensus.


def is_mean_after_one_period(topology, size):
    product = np.eye(size)
    for step in range(topology.period(size)):
        product = matrix(topology, size, step) @ product
    return np.abs(product - 1 / size).max() < 1e-14


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["simple-base", "base"])
def test_base_graphs_are_exact_after_one_period_for_any_number_of_ranks(name, k):
    topology = named(name, Settings(peers=k))
    assert all(is_mean_after_one_period(topology, size) for size in range(1, 65))


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_hyper_hypercubes_are_exact_after_one_period_wherever_there_is_one(k):
    topology = named("hyper-hypercube", Settings(peers=k))
    assert all(is_mean_after_one_period(topology, size) for size in allowed(topology, range(1, 65)))


@pytest.mark.parametrize("name", ["one-peer-exponential", "hypercube", "complete"])
def test_powers_of_two_are_exact_after_one_period(name):
    for log_size in range(7):
        assert is_mean_after_one_period(named(name), 1 << log_size)


@pytest.mark.parametrize("name", ["one-peer-exponential", "hypercube"])
def test_so_they_are_from_any_step_on(name):
    topology = named(name)
    for first in range(1, 5):
        product = np.eye(16)
        for step in range(first, first + 4):
            product = matrix(topology, 16, step) @ product
        assert np.abs(product - 1 / 16).max() < 1e-14


def test_one_peer_exponential_is_exact_at_no_other_size():
    sizes = [size for size in range(3, 65) if size & (size - 1)]
    assert {rounds_to_consensus(named("one-peer-exponential"), size) for size in sizes} == {None}


def distance_from_mean(topology, size, steps):
    values = np.random.default_rng(1).normal(size=size)
    values -= values.mean()
    mixed = values
    for step in range(steps):
        mixed = matrix(topology, size, step) @ mixed
    return np.linalg.norm(mixed) / np.linalg.norm(values)


@for_every_topology
def test_all_come_together_in_the_end(topology):
    for size in allowed(topology, [2, 3, 5, 8, 12]):
        assert distance_from_mean(topology, size, 250) < 1e-6


# Push-sum, where only columns sum to one.


def irregular(size, seed):
    """A ring in one direction, so that all are reached, and some edges at random."""
    graph = nx.gnp_random_graph(size, 0.2, seed=seed, directed=True)
    nx.add_cycle(graph, range(size))
    return graph


@pytest.mark.parametrize("size", [3, 8, 17])
def test_push_sum_finds_the_mean_where_only_columns_sum_to_one(size):
    topology = of_graph(irregular(size, seed=size))
    dense = matrix(topology, size)
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
    topology = named(name)
    for size in allowed(topology, [5, 8]):
        weights = np.ones(size)
        for step, segment in rounds(topology, size):
            weights = matrix(topology, size, step, segment) @ weights
        np.testing.assert_allclose(weights, 1, rtol=0, atol=1e-12)


# Groups.


@for_every_name
def test_one_group_is_the_mean_of_all(name):
    topology = named(name, Settings(groups=1))
    for size in SIZES:
        alone = matrix(topology, size)
        np.testing.assert_allclose(alone, matrix(named("complete"), size), rtol=0, atol=1e-15)


@for_every_name
def test_as_many_groups_as_ranks_are_the_topology_itself(name):
    flat = named(name)
    for size in allowed(flat):
        lifted = grouped(flat, size)
        for step, segment in rounds(flat, size):
            assert everybody(lifted, size, step, segment) == everybody(flat, size, step, segment)


@for_every_name
def test_groups_are_exact_inside_and_talk_as_one_rank_each_would(name):
    topology = named(name, Settings(groups=4))
    for step in range(3):
        dense = matrix(topology, 12, step)
        wanted = np.kron(matrix(named(name), 4, step), np.full((3, 3), 1 / 3))
        np.testing.assert_allclose(dense, wanted, rtol=0, atol=1e-15)


# Steady state: every round adds noise of variance 1 to each value, and mixes.


def steady_disagreement(topology, size, steps=400, coordinates=500):
    """Return the variance of a rank around the mean, after the mixing."""
    generator = np.random.default_rng(size)
    values, seen = np.zeros((size, coordinates)), []
    for step in range(steps):
        values = matrix(topology, size, step) @ (values + generator.normal(size=values.shape))
        values -= values.mean(axis=0)
        seen.append(np.square(values).mean())
    return np.mean(seen[50:])


def derangement_form(n):
    return (n - 1) * (n - 2) / n**2


def exponential_form(n):
    return 1 - (1 + np.log2(n)) / n


def equidyn_form(n):
    # A round leaves (n-1)/2n of the square, in every direction alike.
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
def test_disagreement_under_noise_is_what_the_closed_form_says(name, form, size):
    assert steady_disagreement(named(name), size) == pytest.approx(form(size), rel=0.05)


def test_disagreement_of_groups_is_that_of_as_many_ranks_with_less_noise():
    # Three ranks of a group see each other's noise: a third of its variance is left.
    found = steady_disagreement(grouped(named("derangement"), 8), 24, coordinates=1500)
    assert found == pytest.approx(derangement_form(8) / 3, rel=0.05)

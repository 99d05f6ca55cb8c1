import numpy as np
import pytest

from stretto.topology import named
from stretto.topology.analysis import (
    Counts,
    counts,
    is_column_stochastic,
    is_doubly_stochastic,
    matrix,
    report,
    rounds_to_consensus,
    spectral_gap,
)
from stretto.topology.mixing import Edge, Peers, Topology


def gap(name, size, **more):
    return spectral_gap(named(name), size, **more)


def lopsided(rank, size, step, segment):
    """Rank 0 gives half of what it has to rank 1, and gets nothing."""
    if rank == 0:
        return Peers(0.5, sends=(Edge(1, 0.5),))
    return Peers(1.0, receives=(Edge(0, 0.5),))


def test_row_i_is_what_rank_i_hears():
    assert matrix(lopsided, 2).tolist() == [[0.5, 0.0], [0.5, 1.0]]


def test_stochastic_columns_alone_are_told_from_stochastic_rows_and_columns():
    assert is_column_stochastic(matrix(lopsided, 2))
    assert not is_doubly_stochastic(matrix(lopsided, 2))
    assert is_doubly_stochastic(np.full((2, 2), 0.5))
    assert not is_column_stochastic(np.array([[2.0, 0.0], [-1.0, 1.0]]))


def test_messages_are_counted_at_both_ends():
    assert counts(lopsided, 2) == [Counts(1, 0), Counts(0, 1)]


@pytest.mark.parametrize("size", [6, 8, 16, 30])
def test_the_gap_of_a_static_exponential_graph_is_the_known_one(size):
    reach = (size - 1).bit_length()
    assert gap("static-exponential", size) == pytest.approx(2 / (1 + reach))


@pytest.mark.parametrize("size", [4, 8, 15])
def test_the_gap_of_a_ring_is_the_known_one(size):
    largest = max(abs(1 + 2 * np.cos(2 * np.pi * k / size)) / 3 for k in range(1, size))
    assert gap("ring", size) == pytest.approx(1 - largest)


@pytest.mark.parametrize("size", [3, 6, 12])
def test_the_gap_of_a_derangement_is_the_known_one(size):
    known = 1 - np.sqrt(0.5 * (1 - 1 / (size - 1)))
    assert gap("derangement", size, samples=3000) == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize(
    ("size", "left"), [(6, 0.217), (12, 0.209), (17, 0.061), (24, 0.207), (25, 0.192), (33, 0.031)]
)
def test_one_cycle_of_one_peer_leaves_what_was_found_before(size, left):
    period = named("one-peer-exponential").period(size)
    factor = 1 - gap("one-peer-exponential", size)
    assert factor**period == pytest.approx(left, abs=6e-4)


@pytest.mark.parametrize(
    ("name", "size", "rounds"),
    [
        ("complete", 7, 1),
        ("ring", 3, 1),
        ("ring", 4, None),
        ("one-peer-exponential", 16, 4),
        ("one-peer-exponential", 6, None),
        ("base", 6, 4),
        ("derangement", 8, None),
        ("derangement", 2, 1),
        ("ring", 1, 0),
    ],
)
def test_rounds_to_consensus(name, size, rounds):
    assert rounds_to_consensus(named(name), size) == rounds


def test_consensus_beyond_the_limit_is_not_looked_for():
    assert rounds_to_consensus(named("base"), 6, limit=3) is None


def test_a_graph_that_is_the_same_in_all_rounds_may_be_exact_after_several():
    def de_bruijn(rank, size, step, segment):  # tells the two that begin where its digits end
        told = {(2 * rank + bit) % size for bit in (0, 1)}
        heard = {rank // 2 + half for half in (0, size // 2)}
        sends = tuple(Edge(other, 0.5) for other in told if other != rank)
        receives = tuple(Edge(other, 0.5) for other in heard if other != rank)
        return Peers(0.5 if rank in told else 0.0, sends, receives)

    assert rounds_to_consensus(Topology("de-bruijn", de_bruijn), 8) == 3


def test_a_report_says_it_all():
    told = report(named("base"), 6)
    assert (told.name, told.size, told.period) == ("base", 6, 4)
    assert told.doubly_stochastic
    assert told.rounds_to_consensus == 4
    assert told.spectral_gap == 1.0
    assert told.most_messages == Counts(1, 1)


def test_of_one_rank_there_is_not_much_to_report():
    told = report(named("derangement"), 1)
    assert told.most_messages == Counts(0, 0)
    assert told.rounds_to_consensus == 0
    assert told.spectral_gap == 1.0


def test_where_rows_do_not_sum_to_one_no_gap_is_told():
    topology = Topology("lopsided", lopsided, doubly_stochastic=False)
    assert spectral_gap(topology, 2) is None
    assert not report(topology, 2).doubly_stochastic

import numpy as np
import pytest

from stretto.topology import make_topology
from stretto.topology.analysis import (
    MessageCounts,
    analyze_topology,
    is_column_stochastic,
    is_doubly_stochastic,
    message_counts,
    mixing_matrix,
    rounds_to_consensus,
    spectral_gap,
)
from stretto.topology.round_peers import Edge, RoundPeers, Topology


def gap(name, size, **more):
    return spectral_gap(make_topology(name), size, **more)


def lopsided(rank, size, step, segment):
    """Rank 0 sends half of its value to rank 1, and receives nothing."""
    if rank == 0:
        return RoundPeers(0.5, sends=(Edge(1, 0.5),))
    return RoundPeers(1.0, receives=(Edge(0, 0.5),))


def test_row_i_has_the_weights_of_rank_i():
    assert mixing_matrix(lopsided, 2).tolist() == [[0.5, 0.0], [0.5, 1.0]]


def test_column_and_double_stochasticity_are_distinguished():
    assert is_column_stochastic(mixing_matrix(lopsided, 2))
    assert not is_doubly_stochastic(mixing_matrix(lopsided, 2))
    assert is_doubly_stochastic(np.full((2, 2), 0.5))
    assert not is_column_stochastic(np.array([[2.0, 0.0], [-1.0, 1.0]]))


def test_sent_and_received_messages_are_counted():
    assert message_counts(lopsided, 2) == [MessageCounts(1, 0), MessageCounts(0, 1)]


@pytest.mark.parametrize("size", [6, 8, 16, 30])
def test_the_gap_of_a_static_exponential_graph_is_the_known_one(size):
    num_peers = (size - 1).bit_length()
    assert gap("static-exponential", size) == pytest.approx(2 / (1 + num_peers))


@pytest.mark.parametrize("size", [4, 8, 15])
def test_the_gap_of_a_ring_is_the_known_one(size):
    largest = max(abs(1 + 2 * np.cos(2 * np.pi * k / size)) / 3 for k in range(1, size))
    assert gap("ring", size) == pytest.approx(1 - largest)


@pytest.mark.parametrize("size", [3, 6, 12])
def test_the_gap_of_a_derangement_is_the_known_one(size):
    expected = 1 - np.sqrt(0.5 * (1 - 1 / (size - 1)))
    assert gap("derangement", size, samples=3000) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("size", "left"), [(6, 0.217), (12, 0.209), (17, 0.061), (24, 0.207), (25, 0.192), (33, 0.031)]
)
def test_one_period_of_one_peer_exponential_leaves_the_known_disagreement(size, left):
    period = make_topology("one-peer-exponential").period(size)
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
    assert rounds_to_consensus(make_topology(name), size) == rounds


def test_rounds_beyond_the_limit_are_not_examined():
    assert rounds_to_consensus(make_topology("base"), 6, limit=3) is None


def test_a_static_graph_may_be_exact_after_several_rounds():
    def de_bruijn(
        rank, size, step, segment
    ):  # sends to the two ranks that begin with its last digits
        receivers = {(2 * rank + bit) % size for bit in (0, 1)}
        senders = {rank // 2 + half for half in (0, size // 2)}
        sends = tuple(Edge(other, 0.5) for other in receivers if other != rank)
        receives = tuple(Edge(other, 0.5) for other in senders if other != rank)
        return RoundPeers(0.5 if rank in receivers else 0.0, sends, receives)

    assert rounds_to_consensus(Topology("de-bruijn", de_bruijn), 8) == 3


def test_a_report_has_all_properties():
    report = analyze_topology(make_topology("base"), 6)
    assert (report.name, report.size, report.period) == ("base", 6, 4)
    assert report.doubly_stochastic
    assert report.rounds_to_consensus == 4
    assert report.spectral_gap == 1.0
    assert report.max_messages == MessageCounts(1, 1)


def test_the_report_of_one_rank_has_no_messages():
    report = analyze_topology(make_topology("derangement"), 1)
    assert report.max_messages == MessageCounts(0, 0)
    assert report.rounds_to_consensus == 0
    assert report.spectral_gap == 1.0


def test_without_stochastic_rows_there_is_no_spectral_gap():
    topology = Topology("lopsided", lopsided, doubly_stochastic=False)
    assert spectral_gap(topology, 2) is None
    assert not analyze_topology(topology, 2).doubly_stochastic

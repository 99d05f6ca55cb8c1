import pytest

from stretto.topology.graphs import circulant_peers, complete, ring
from stretto.topology.round_peers import Edge, RoundPeers


def test_ranks_send_ahead_and_receive_from_behind():
    peers = circulant_peers(1, 5, [1, 3])
    assert peers.self_weight == pytest.approx(1 / 3)
    assert [edge.rank for edge in peers.sends] == [2, 4]
    assert [edge.rank for edge in peers.receives] == [0, 3]


def test_a_given_weight_leaves_the_rest_for_the_own_value():
    assert circulant_peers(0, 4, [1], 0.25) == RoundPeers(0.75, (Edge(1, 0.25),), (Edge(3, 0.25),))


def test_a_ring_has_a_neighbour_on_each_side():
    peers = ring()(0, 5)
    assert sorted(edge.rank for edge in peers.receives) == [1, 4]
    assert {edge.weight for edge in peers.receives} == {1 / 3}


def test_two_ranks_in_a_ring_have_one_neighbour():
    assert ring()(0, 2) == RoundPeers(0.5, (Edge(1, 0.5),), (Edge(1, 0.5),))


def test_in_a_complete_graph_all_ranks_have_equal_weights():
    peers = complete()(2, 4)
    assert sorted(peers.receives) == [(0, 0.25), (1, 0.25), (3, 0.25)]
    assert peers.self_weight == 0.25

import pytest

from stretto.topology.circulant import circulant, complete, ring
from stretto.topology.mixing import Edge, Peers


def test_all_tell_ahead_and_hear_from_behind():
    peers = circulant(1, 5, [1, 3])
    assert peers.own == pytest.approx(1 / 3)
    assert [edge.rank for edge in peers.sends] == [2, 4]
    assert [edge.rank for edge in peers.receives] == [0, 3]


def test_a_weight_of_ones_own_leaves_the_rest_to_oneself():
    assert circulant(0, 4, [1], 0.25) == Peers(0.75, (Edge(1, 0.25),), (Edge(3, 0.25),))


def test_a_ring_has_a_neighbour_on_each_side():
    peers = ring()(0, 5)
    assert sorted(edge.rank for edge in peers.receives) == [1, 4]
    assert {edge.weight for edge in peers.receives} == {1 / 3}


def test_two_ranks_in_a_ring_have_one_neighbour():
    assert ring()(0, 2) == Peers(0.5, (Edge(1, 0.5),), (Edge(1, 0.5),))


def test_in_a_complete_graph_all_others_are_heard_alike():
    peers = complete()(2, 4)
    assert sorted(peers.receives) == [(0, 0.25), (1, 0.25), (3, 0.25)]
    assert peers.own == 0.25

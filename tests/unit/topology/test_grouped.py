import networkx as nx
import pytest

from stretto.errors import ConfigError
from stretto.topology.analysis import topology_from_graph
from stretto.topology.base_graph import hypercube
from stretto.topology.graphs import one_peer_exponential, ring
from stretto.topology.round_peers import grouped, ranks_of_group


def test_groups_are_consecutive_ranks():
    assert [list(ranks_of_group(group, 3)) for group in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_a_rank_averages_its_group_and_the_groups_that_send_to_it():
    peers = grouped(one_peer_exponential(), 3)(2, 6)  # group 1 receives from group 0
    assert peers.self_weight == 0.25
    assert sorted(peers.receives) == [(0, 0.25), (1, 0.25), (3, 0.25)]
    assert sorted(edge.rank for edge in peers.sends) == [3, 4, 5]


def test_the_period_is_that_of_the_groups():
    assert grouped(one_peer_exponential(), 8).period(64) == 3


def test_groups_of_a_graph_that_is_not_balanced_are_not_balanced_either():
    uneven = topology_from_graph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))
    assert not grouped(uneven, 3).doubly_stochastic


def test_a_number_that_does_not_divide_is_refused_with_those_that_do():
    message = (
        "^ring between 5 groups: 12 ranks can be 1, 2, 3, 4, 6 or 12 groups of equal size, not 5$"
    )
    with pytest.raises(ConfigError, match=message):
        grouped(ring(), 5)(0, 12)


def test_more_groups_than_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"1 ranks can be 1 groups of equal size, not 2$"):
        grouped(ring(), 2).check(1)


def test_a_number_of_groups_that_the_topology_refuses_is_refused():
    message = "^hypercube between 6 groups: needs a power of two: 4 or 8, not 6$"
    with pytest.raises(ConfigError, match=message):
        grouped(hypercube(), 6).check(12)


def test_no_groups_are_refused():
    with pytest.raises(ConfigError, match=r"^groups must be at least 1, got 0$"):
        grouped(ring(), 0)

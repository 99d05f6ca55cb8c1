import networkx as nx
import pytest

from stretto.errors import ConfigError
from stretto.topology.analysis import (
    is_column_stochastic,
    is_doubly_stochastic,
    mixing_matrix,
    topology_from_graph,
)


def test_a_rank_of_a_directed_graph_splits_its_value_evenly():
    topology = topology_from_graph(nx.DiGraph([(0, 1), (0, 2), (1, 0), (2, 0)]))
    assert topology(0, 3).sends == ((1, pytest.approx(1 / 3)), (2, pytest.approx(1 / 3)))
    assert topology(0, 3).receives == ((1, 0.5), (2, 0.5))
    assert not topology.doubly_stochastic
    assert is_column_stochastic(mixing_matrix(topology, 3))


def test_a_balanced_directed_graph_is_doubly_stochastic():
    assert topology_from_graph(
        nx.circulant_graph(7, [1, 2], create_using=nx.DiGraph)
    ).doubly_stochastic


def test_an_irregular_undirected_graph_is_doubly_stochastic():
    topology = topology_from_graph(nx.star_graph(5))
    assert topology.doubly_stochastic
    assert is_doubly_stochastic(mixing_matrix(topology, 6))


def test_a_loop_of_a_rank_to_itself_is_no_message():
    graph = nx.DiGraph([(0, 1), (1, 0), (0, 0)])
    assert topology_from_graph(graph)(0, 2).sends == ((1, 0.5),)


def test_later_changes_of_the_graph_have_no_effect():
    graph = nx.path_graph(3)
    topology = topology_from_graph(graph)
    before = topology(0, 3)
    graph.add_edge(0, 2)
    assert topology(0, 3) == before


def test_another_size_than_the_graphs_is_refused():
    with pytest.raises(ConfigError, match=r"^custom: the graph has 3 ranks, not 4$"):
        topology_from_graph(nx.path_graph(3)).check(4)


@pytest.mark.parametrize("nodes", [[], [1, 2], ["a"]])
def test_nodes_that_are_not_the_ranks_are_refused(nodes):
    graph = nx.Graph()
    graph.add_nodes_from(nodes)
    with pytest.raises(ConfigError, match="must be the ranks 0 to"):
        topology_from_graph(graph)


@pytest.mark.parametrize("graph", [nx.DiGraph([(0, 1)]), nx.empty_graph(2)])
def test_a_graph_that_is_not_connected_is_refused(graph):
    with pytest.raises(ConfigError, match="not connected"):
        topology_from_graph(graph)

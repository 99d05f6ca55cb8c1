from stretto.topology import make_topology
from stretto.topology.analysis import round_graph, round_lines


def test_a_graph_has_an_edge_for_every_message_and_a_node_for_every_rank():
    drawn = round_graph(make_topology("one-peer-exponential"), 4, step=1)
    assert sorted(drawn.edges(data="weight")) == [
        (0, 2, 0.5),
        (1, 3, 0.5),
        (2, 0, 0.5),
        (3, 1, 0.5),
    ]
    assert sorted(round_graph(make_topology("matching"), 3).nodes) == [0, 1, 2]


def test_there_is_a_line_for_every_round_of_a_period():
    assert round_lines(make_topology("one-peer-exponential"), 3) == ["0>1 1>2 2>0", "0>2 1>0 2>1"]


def test_messages_in_both_directions_are_one_dash():
    assert round_lines(make_topology("hypercube"), 4) == ["0-1 2-3", "0-2 1-3"]


def test_the_number_of_rounds_shown_of_random_peers_can_be_set():
    assert len(round_lines(make_topology("derangement"), 5)) == 4
    assert len(round_lines(make_topology("derangement"), 5, rounds=7)) == 7
    first, other = (
        round_lines(make_topology("derangement"), 9, segment=segment) for segment in (0, 1)
    )
    assert first != other


def test_one_rank_has_no_messages():
    assert round_lines(make_topology("ring"), 1) == ["no messages"]

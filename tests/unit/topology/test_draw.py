from stretto.topology import named
from stretto.topology.draw import graph, lines


def test_a_graph_has_an_edge_for_every_message_and_a_node_for_every_rank():
    drawn = graph(named("one-peer-exponential"), 4, step=1)
    assert sorted(drawn.edges(data="weight")) == [
        (0, 2, 0.5),
        (1, 3, 0.5),
        (2, 0, 0.5),
        (3, 1, 0.5),
    ]
    assert sorted(graph(named("matching"), 3).nodes) == [0, 1, 2]


def test_there_is_a_line_for_every_round_of_a_period():
    assert lines(named("one-peer-exponential"), 3) == ["0>1 1>2 2>0", "0>2 1>0 2>1"]


def test_messages_both_ways_are_one_mark():
    assert lines(named("hypercube"), 4) == ["0-1 2-3", "0-2 1-3"]


def test_of_drawn_peers_as_many_rounds_are_shown_as_asked_for():
    assert len(lines(named("derangement"), 5)) == 4
    assert len(lines(named("derangement"), 5, rounds=7)) == 7
    first, other = (lines(named("derangement"), 9, segment=segment) for segment in (0, 1))
    assert first != other


def test_one_rank_draws_as_nobody():
    assert lines(named("ring"), 1) == ["nobody talks"]

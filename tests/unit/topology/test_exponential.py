import pytest

from stretto.topology.graphs import one_peer_exponential, static_exponential


def receivers(topology, rank, size, step=0):
    return [edge.rank for edge in topology(rank, size, step).sends]


def test_a_static_graph_sends_to_every_power_of_two_below_the_size():
    assert receivers(static_exponential(), 0, 9) == [1, 2, 4, 8]
    assert receivers(static_exponential(), 0, 8) == [1, 2, 4]
    assert receivers(static_exponential(), 5, 8) == [6, 7, 1]


def test_one_peer_exponential_uses_these_distances_in_turn():
    assert [receivers(one_peer_exponential(), 1, 6, step) for step in range(4)] == [
        [2],
        [3],
        [5],
        [2],
    ]


@pytest.mark.parametrize(("size", "period"), [(1, 1), (2, 1), (3, 2), (8, 3), (9, 4), (1000, 10)])
def test_a_period_is_the_logarithm_of_the_size(size, period):
    assert one_peer_exponential().period(size) == period

import math

import pytest

from stretto.errors import ConfigError
from stretto.topology.analysis import round_lines
from stretto.topology.base_graph import base_graph, simple_base_graph

LENGTHS = {3: (3, 3), 5: (5, 5), 6: (5, 4), 7: (5, 5), 10: (7, 6), 12: (7, 5), 24: (9, 6)}
LENGTHS |= {25: (9, 9), 48: (11, 7), 60: (11, 9), 8: (3, 3), 1: (1, 1)}


@pytest.mark.parametrize("size", LENGTHS)
def test_periods_of_base_2_are_the_known_ones(size):
    assert (simple_base_graph().period(size), base_graph().period(size)) == LENGTHS[size]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_a_period_is_within_the_bound_of_the_paper(k):
    for size in range(2, 300):
        bound = 2 * math.log(size, k + 1) + 2
        simple, full = simple_base_graph(k).period(size), base_graph(k).period(size)
        assert full <= simple <= bound + 1e-9


def test_of_three_ranks_two_average_and_then_exchange_with_the_third():
    # 3 = 2 + 1. In round 1, ranks 0 and 2 give each other's value the weight 2/3.
    topology = simple_base_graph()
    assert round_lines(topology, 3) == ["0-1", "0-2", "0-1"]
    assert topology(2, 3, 1).receives == ((0, pytest.approx(2 / 3)),)
    assert topology(0, 3, 1).self_weight == pytest.approx(1 / 3)


def test_six_ranks_are_two_blocks_of_three_and_then_pairs():
    assert round_lines(base_graph(), 6) == ["0-1 3-4", "0-2 3-5", "0-1 3-4", "0-3 1-4 2-5"]


def test_a_rank_of_the_rest_exchanges_with_each_copy_of_a_part():
    # k = 2, 7 = 2 x 3 + 1: rank 6 exchanges with one of ranks 0 to 2 and one of 3 to 5.
    topology = simple_base_graph(2)
    assert topology(6, 7, 2).sends == ((0, pytest.approx(3 / 7)), (3, pytest.approx(3 / 7)))


def test_ranks_without_a_counterpart_average_among_themselves():
    # k = 2, 11 = 9 + 2: ranks 9 and 10 exchange with 0 and 1. Meanwhile ranks 2 to 7 average by
    # threes, and 8 has no peer. While nine ranks run a cube again, 9 and 10 average repeatedly.
    first, second = (
        "0-1 0-2 1-2 3-4 3-5 4-5 6-7 6-8 7-8 9-10",
        "0-3 0-6 1-4 1-7 2-5 2-8 3-6 4-7 5-8 9-10",
    )
    between_parts = "0-9 1-10 2-3 2-4 3-4 5-6 5-7 6-7"
    assert round_lines(simple_base_graph(2), 11) == [first, second, between_parts, first, second]


def test_one_rank_of_thousands_is_computed_alone():
    peers = base_graph(3)(9_998, 9_999, 5)
    assert 0 < len(peers.sends) <= 3


@pytest.mark.parametrize("make", [base_graph, simple_base_graph])
def test_a_k_of_zero_is_refused(make):
    with pytest.raises(ConfigError, match=r"^k must be at least 1"):
        make(0)

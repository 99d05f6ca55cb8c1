import math

import pytest

from stretto.errors import ConfigError
from stretto.topology.base_graph import fewest_factors, hyper_hypercube, hypercube


def test_partners_differ_in_one_bit():
    partners = [hypercube()(5, 8, step).sends[0].rank for step in range(4)]
    assert partners == [5 ^ 1, 5 ^ 2, 5 ^ 4, 5 ^ 1]


@pytest.mark.parametrize(
    ("size", "max_factor", "expected"),
    [
        (1, 2, ()),
        (12, 4, (3, 4)),
        (12, 3, (2, 2, 3)),
        (216, 8, (6, 6, 6)),
        (12, 12, (12,)),
        (7, 6, None),
        (10, 3, None),
    ],
)
def test_a_size_is_factored_into_few_factors(size, max_factor, expected):
    assert fewest_factors(size, max_factor) == expected


def test_the_number_of_factors_is_minimal():
    # A greedy choice of the largest factor is not minimal: 216 = 8 x 3 x 3 x 3, but also 6 x 6 x 6.
    for size in range(2, 220):
        for most in range(2, 13):
            if found := fewest_factors(size, most):
                assert math.prod(found) == size
                assert max(found) <= most
                assert len(found) == fewest(size, most)


def fewest(size, most):
    """Return the minimal number of factors, by a breadth-first search over products."""
    reached, length = {1}, 0
    while size not in reached:
        reached |= {n * f for n in reached for f in range(2, most + 1) if size % (n * f) == 0}
        length += 1
    return length


def test_a_round_of_a_hyper_hypercube_averages_along_one_digit():
    topology = hyper_hypercube(2)  # 6 = 2 x 3: the rank is low + 2 high
    assert topology.period(6) == 2
    by_round = [sorted(edge.rank for edge in topology(3, 6, step).receives) for step in (0, 1)]
    assert by_round == [[2], [1, 5]]


def test_a_size_that_is_not_a_power_of_two_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"^hypercube: needs a power of two: 8 or 16, not 12$"):
        hypercube().check(12)


def test_a_size_with_a_large_prime_is_refused_with_possible_sizes_and_k():
    message = (
        "^hyper-hypercube: with k = 2 needs a size without prime factors above 3: 9 or 12, "
        "not 10; or k = 4$"
    )
    with pytest.raises(ConfigError, match=message):
        hyper_hypercube(2)(0, 10)


def test_the_suggested_k_is_the_smallest():
    assert hyper_hypercube(1).size_error(6).endswith("4 or 8, not 6; or k = 2")


def test_a_k_of_zero_is_refused():
    with pytest.raises(ConfigError, match=r"^k must be at least 1 \(.*\), got 0$"):
        hyper_hypercube(0)

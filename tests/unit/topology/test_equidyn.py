import numpy as np
import pytest

from stretto.errors import ConfigError
from stretto.topology.analysis import mixing_matrix
from stretto.topology.graphs import equidyn, undirected_equidyn


def test_all_ranks_send_to_the_same_distance():
    topology = equidyn(seed=2)
    for step in range(20):
        distances = {(topology(r, 7, step).sends[0].rank - r) % 7 for r in range(7)}
        assert len(distances) == 1


def test_the_weight_of_a_peer_is_eta_times_n_minus_1_over_n():
    assert equidyn(eta=0.4)(0, 5).receives[0].weight == pytest.approx(0.4 * 4 / 5)


@pytest.mark.parametrize("eta", [0.3, 0.5])
def test_the_mean_over_all_distances_shrinks_every_direction_equally(eta):
    size, topology = 7, equidyn(eta=eta)
    found = {topology(0, size, step).sends[0].rank: step for step in range(200)}
    assert sorted(found) == list(range(1, size))
    left = [mixing_matrix(topology, size, step) - 1 / size for step in found.values()]
    square = np.mean([each.T @ each for each in left], axis=0)
    factor = 1 - 2 * eta * (1 - eta * (size - 1) / size)
    np.testing.assert_allclose(square, factor * (np.eye(size) - 1 / size), atol=1e-14)


def test_undirected_pairs_are_at_one_distance_and_all_possible_pairs_are_made():
    topology = undirected_equidyn(seed=1)
    for step in range(30):
        peers = [topology(rank, 9, step) for rank in range(9)]
        pairs = {(r, p.sends[0].rank) for r, p in enumerate(peers) if p.sends}
        distances = {min((b - a) % 9, (a - b) % 9) for a, b in pairs}
        assert len(distances) == 1
        unpaired = [rank for rank, each in enumerate(peers) if not each.sends]
        assert not any((a - b) % 9 in distances for a in unpaired for b in unpaired)


@pytest.mark.parametrize("eta", [0.0, 1.0, -1.0, 1.5])
@pytest.mark.parametrize("make", [equidyn, undirected_equidyn])
def test_an_eta_outside_of_0_to_1_is_refused(make, eta):
    with pytest.raises(ConfigError, match=rf"^eta must be above 0 and below 1, got {eta:g}"):
        make(eta=eta)

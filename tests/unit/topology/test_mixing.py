import pytest

from stretto.errors import ConfigError
from stretto.topology.round_peers import Edge, RoundPeers, Topology, shift_edges, symmetric_peers


def no_peers(rank, size, step, segment):
    return RoundPeers(1.0)


def test_symmetric_peers_keep_the_remaining_weight():
    edges = (Edge(3, 0.25), Edge(5, 0.5))
    assert symmetric_peers(edges) == RoundPeers(0.25, edges, edges)
    assert symmetric_peers([]) == RoundPeers(1.0)


def test_positions_become_ranks():
    assert shift_edges([Edge(0, 0.5), Edge(2, 0.5)], first=4, stride=3) == ((4, 0.5), (10, 0.5))


def test_step_and_segment_of_a_topology_default_to_zero():
    calls = []

    def mixing(rank, size, step, segment):
        calls.append((rank, size, step, segment))
        return RoundPeers(1.0)

    topology = Topology("some", mixing)
    assert topology(1, 2) == RoundPeers(1.0)
    topology(0, 2, 7, 3)
    assert calls == [(1, 2, 0, 0), (0, 2, 7, 3)]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ConfigError, match=rf"^rank {rank} is not in a world of 4; ranks count"):
        Topology("some", no_peers)(rank, 4)


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"^some: 0 ranks are too few; at least 1 is needed$"):
        Topology("some", no_peers).check(0)


def test_a_refusal_names_the_topology_and_comes_before_the_mixing():
    topology = Topology("some", no_peers, size_error=lambda size: f"not {size}")
    with pytest.raises(ConfigError, match=r"^some: not 4$"):
        topology(0, 4)

import pytest

from stretto.errors import ConfigError
from stretto.topology.mixing import Edge, Peers, Topology, exchange, shifted


def nobody(rank, size, step, segment):
    return Peers(1.0)


def test_an_exchange_keeps_what_it_does_not_give_away():
    edges = (Edge(3, 0.25), Edge(5, 0.5))
    assert exchange(edges) == Peers(0.25, edges, edges)
    assert exchange([]) == Peers(1.0)


def test_places_become_ranks():
    assert shifted([Edge(0, 0.5), Edge(2, 0.5)], first=4, stride=3) == ((4, 0.5), (10, 0.5))


def test_a_topology_is_a_mixing_whose_step_and_segment_may_be_left_out():
    asked = []

    def mixing(rank, size, step, segment):
        asked.append((rank, size, step, segment))
        return Peers(1.0)

    topology = Topology("some", mixing)
    assert topology(1, 2) == Peers(1.0)
    topology(0, 2, 7, 3)
    assert asked == [(1, 2, 0, 0), (0, 2, 7, 3)]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ConfigError, match=rf"^rank {rank} is not in a world of 4; ranks count"):
        Topology("some", nobody)(rank, 4)


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"^some: 0 ranks cannot talk; there is at least 1$"):
        Topology("some", nobody).check(0)


def test_a_refusal_names_the_topology_and_is_raised_before_the_mixing_is_asked():
    topology = Topology("some", nobody, refuses=lambda size: f"not {size}")
    with pytest.raises(ConfigError, match=r"^some: not 4$"):
        topology(0, 4)

from stretto.topology import keyed_random as keyed
from stretto.topology.graphs import derangement, matching
from stretto.topology.round_peers import Edge, RoundPeers


def test_the_sender_of_a_rank_follows_the_cycle():
    cycle = keyed.random_cycle(7, 3, 4, 5)
    senders = [derangement(3)(rank, 7, 4, 5).receives[0].rank for rank in range(7)]
    assert senders == list(cycle)


def test_two_ranks_are_always_peers():
    both = RoundPeers(0.5, (Edge(1, 0.5),), (Edge(1, 0.5),))
    assert {derangement(s)(0, 2, t) for s in range(3) for t in range(3)} == {both}
    assert matching()(0, 2) == both


def test_drawn_peers_have_no_period():
    assert derangement().period(8) is None
    assert matching().period(8) is None


def test_each_of_three_ranks_is_sometimes_unpaired():
    unpaired = {r for step in range(40) for r in range(3) if not matching()(r, 3, step).sends}
    assert unpaired == {0, 1, 2}

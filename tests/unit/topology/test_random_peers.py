from stretto.topology import keyed
from stretto.topology.mixing import Edge, Peers
from stretto.topology.random_peers import derangement, matching


def test_whom_a_rank_hears_is_where_the_circle_leads():
    circle = keyed.cycle(7, 3, 4, 5)
    heard = [derangement(3)(rank, 7, 4, 5).receives[0].rank for rank in range(7)]
    assert heard == list(circle)


def test_two_ranks_always_meet():
    both = Peers(0.5, (Edge(1, 0.5),), (Edge(1, 0.5),))
    assert {derangement(s)(0, 2, t) for s in range(3) for t in range(3)} == {both}
    assert matching()(0, 2) == both


def test_drawn_peers_have_no_period():
    assert derangement().period(8) is None
    assert matching().period(8) is None


def test_of_three_ranks_each_is_left_alone_now_and_then():
    alone = {r for step in range(40) for r in range(3) if not matching()(r, 3, step).sends}
    assert alone == {0, 1, 2}

"""The roll call: what the cards of all ranks say together."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cluster.meet import Card, settle_mesh
from stretto.cluster.world import Mesh
from stretto.errors import LaunchError


def cards(ranks_per_host):
    hosts = [f"host-{host}" for host, count in enumerate(ranks_per_host) for _ in range(count)]
    return [Card(rank, len(hosts), host, "openmpi", "j") for rank, host in enumerate(hosts)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_hosts_may_have_different_numbers_of_ranks(ranks_per_host):
    assert settle_mesh(cards(ranks_per_host)) == Mesh(tuple(ranks_per_host))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("size", 9, r"rank 0 and rank 2 .*size 4 and 9"),
        ("job", "old", r"job 'j' and 'old'.*MASTER_PORT"),
        ("launcher", "slurm", r"launcher 'openmpi' and 'slurm'"),
    ],
)
def test_a_rank_started_differently_is_named_with_what_differs(field, value, words):
    dealt = cards([2, 2])
    dealt[2] = replace(dealt[2], **{field: value})
    with pytest.raises(LaunchError, match=words):
        settle_mesh(dealt)


def test_ranks_dealt_out_in_turn_are_refused_with_the_option_that_helps():
    dealt = cards([2, 2])
    dealt[1], dealt[2] = replace(dealt[2], rank=1), replace(dealt[1], rank=2)
    with pytest.raises(LaunchError, match=r"'host-0'.*--map-by slot"):
        settle_mesh(dealt)

"""The rendezvous: the mesh that the facts of all ranks give, or the error."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cluster.rendezvous import RankInfo, mesh_from_rank_infos
from stretto.cluster.world import Mesh
from stretto.errors import LaunchError


def rank_infos_of(ranks_per_host):
    hosts = [f"host-{host}" for host, count in enumerate(ranks_per_host) for _ in range(count)]
    return [RankInfo(rank, len(hosts), host, "openmpi", "j") for rank, host in enumerate(hosts)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_hosts_may_have_different_numbers_of_ranks(ranks_per_host):
    assert mesh_from_rank_infos(rank_infos_of(ranks_per_host)) == Mesh(tuple(ranks_per_host))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("size", 9, r"rank 0 and rank 2 .*size 4 and 9"),
        ("job", "old", r"job 'j' and 'old'.*MASTER_PORT"),
        ("launcher", "slurm", r"launcher 'openmpi' and 'slurm'"),
    ],
)
def test_a_rank_started_differently_is_named_with_the_field_that_differs(field, value, message):
    infos = rank_infos_of([2, 2])
    infos[2] = replace(infos[2], **{field: value})
    with pytest.raises(LaunchError, match=message):
        mesh_from_rank_infos(infos)


def test_ranks_numbered_across_hosts_in_turn_are_refused_with_the_option_that_helps():
    infos = rank_infos_of([2, 2])
    infos[1], infos[2] = replace(infos[2], rank=1), replace(infos[1], rank=2)
    with pytest.raises(LaunchError, match=r"'host-0'.*--map-by slot"):
        mesh_from_rank_infos(infos)

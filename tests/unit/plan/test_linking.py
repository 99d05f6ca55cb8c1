"""Links from descriptions: as many messages, one after another, as the algorithms send."""

import pytest

from stretto.cluster.world import Mesh
from stretto.errors import ConfigError
from stretto.plan.linking import Line, block_bytes, described, link_from_cluster, link_of
from stretto.plan.profile import Link
from stretto.sim import PRESETS, preset
from stretto.sim.cluster import Cluster, Transport

FREE = Cluster(
    ranks_per_host=(1,) * 4,
    between=Transport(latency_s=1e-4, bytes_per_s=1e9),
    inside=Transport(latency_s=1e-5, bytes_per_s=1e10),
)
"""Cores cost nothing: the papers' formulas hold."""


@pytest.mark.parametrize("hosts", [2, 4, 7])
def test_a_ring_between_hosts_takes_a_message_less_than_it_has_ranks(hosts):
    link = link_from_cluster(FREE, Mesh((1,) * hosts), lanes=3)
    assert link.latency_s == pytest.approx((hosts - 1) * 1e-4)
    assert link.bytes_per_s == pytest.approx(1e9)
    assert (link.ranks, link.hosts, link.lanes) == (hosts, hosts, 3)
    assert link.across_s(8e9) == pytest.approx((hosts - 1) * 1e-4 + 8 * (hosts - 1) / hosts)


def test_one_host_has_the_rate_inside():
    link = link_from_cluster(FREE, Mesh((4,)))
    assert link.latency_s == pytest.approx(3 * 1e-5)
    assert link.bytes_per_s == pytest.approx(1e10)
    assert link.inner_bytes_per_s is None


def test_several_ranks_on_several_hosts_have_both():
    link = link_from_cluster(FREE, Mesh((4, 4)))
    assert (link.ranks, link.hosts, link.per_host) == (8, 2, 4)
    assert link.latency_s == pytest.approx(1e-4)
    assert link.bytes_per_s == pytest.approx(1e9)
    assert link.inner_latency_s == pytest.approx(3e-5)
    assert link.inner_bytes_per_s == pytest.approx(1e10)


def test_hosts_that_differ_are_one_ring():
    link = link_from_cluster(FREE, Mesh((3, 2)))
    assert (link.ranks, link.hosts) == (5, 1)
    assert 0.5e9 < link.bytes_per_s <= 1.01e9


def test_one_rank_waits_for_nobody():
    link = link_from_cluster(FREE, Mesh((1,)))
    assert link.across_s(1e9) == 0


@pytest.mark.parametrize("name", PRESETS)
def test_every_named_cluster_has_a_link(name):
    link = link_from_cluster(preset(name))
    assert link.ranks == preset(name).mesh.size
    assert 0.5 < link.bytes_per_s / preset(name).between.bytes_per_s <= 1.0001


def test_cores_that_cost_something_make_it_slower():
    busy = FREE.model_copy(
        update={
            "cpu": FREE.cpu.model_copy(update={"s_per_message": 1e-3, "s_per_byte_added": 1e-8})
        }
    )
    free, slow = link_from_cluster(FREE), link_from_cluster(busy)
    assert slow.latency_s > 2 * free.latency_s
    assert slow.bytes_per_s < free.bytes_per_s


def test_lines_are_what_the_link_of_them_takes():
    mesh = Mesh((2, 2))
    across, inside = Line(3e-3, 5e-9), Line(1e-3, 2e-9)
    link = link_of(mesh, across, inside)
    assert link.across_s(1e8) == pytest.approx(3e-3 + 0.5)
    assert link.inside_s(1e8) == pytest.approx(1e-3 + 0.2)
    flat = link_of(Mesh((1,) * 4), across)
    assert flat.across_s(1e8) == pytest.approx(3e-3 + 0.5)


def test_a_part_that_is_longer_than_the_whole_leaves_something_between():
    link = link_of(Mesh((2, 2)), Line(1e-3, 1e-9), Line(2e-3, 9e-9))
    assert link.latency_s == 0
    assert link.bytes_per_s > 0


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "worth"),
    [
        (1e-3, 1e9, 9_000_000),  # 10 ms, of which 9 are bytes
        (1e-6, 1e9, 1_000_000),
        (1.0, 1e9, 500_000_000),
    ],
)
def test_blocks_are_joined_until_latency_is_a_tenth(latency_s, bytes_per_s, worth):
    assert block_bytes(Link(ranks=4, latency_s=latency_s, bytes_per_s=bytes_per_s)) == worth


def test_a_cluster_is_a_name_or_a_file(tmp_path):
    assert described("box 400mbit") == preset("box 400mbit")
    FREE.write(tmp_path / "cluster.toml")
    assert described(str(tmp_path / "cluster.toml")) == FREE
    with pytest.raises(ConfigError, match="stretto calibrate"):
        described(str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match="box 400mbit"):
        described("box 400mbi")

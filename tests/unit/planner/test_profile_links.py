"""Links from cluster descriptions have the costs of the collective algorithms."""

import pytest

from stretto.cluster.world import Mesh
from stretto.errors import ConfigError
from stretto.planner.profile import (
    LatencyBandwidth,
    Link,
    link_from_cluster,
    link_from_costs,
    load_cluster_or_preset,
    worthwhile_unit_bytes,
)
from stretto.simulator import PRESETS, preset
from stretto.simulator.cluster import Cluster, LinkCosts

FREE = Cluster(
    ranks_per_host=(1,) * 4,
    between=LinkCosts(latency_s=1e-4, bytes_per_s=1e9),
    inside=LinkCosts(latency_s=1e-5, bytes_per_s=1e10),
)
"""CPU costs are zero, so the formulas of the papers hold."""


@pytest.mark.parametrize("hosts", [2, 4, 7])
def test_a_ring_between_hosts_takes_a_message_less_than_it_has_ranks(hosts):
    link = link_from_cluster(FREE, Mesh((1,) * hosts), lanes=3)
    assert link.latency_s == pytest.approx((hosts - 1) * 1e-4)
    assert link.bytes_per_s == pytest.approx(1e9)
    assert (link.ranks, link.hosts, link.lanes) == (hosts, hosts, 3)
    assert link.all_ranks_s(8e9) == pytest.approx((hosts - 1) * 1e-4 + 8 * (hosts - 1) / hosts)


def test_one_host_has_the_rate_inside():
    link = link_from_cluster(FREE, Mesh((4,)))
    assert link.latency_s == pytest.approx(3 * 1e-5)
    assert link.bytes_per_s == pytest.approx(1e10)
    assert link.inner_bytes_per_s is None


def test_several_ranks_on_several_hosts_have_both_rates():
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


def test_one_rank_needs_no_time():
    link = link_from_cluster(FREE, Mesh((1,)))
    assert link.all_ranks_s(1e9) == 0


@pytest.mark.parametrize("name", PRESETS)
def test_every_named_cluster_has_a_link(name):
    link = link_from_cluster(preset(name))
    assert link.ranks == preset(name).mesh.size
    assert 0.5 < link.bytes_per_s / preset(name).between.bytes_per_s <= 1.0001


def test_cpu_costs_make_the_link_slower():
    busy = FREE.model_copy(
        update={
            "cpu": FREE.cpu.model_copy(update={"s_per_message": 1e-3, "s_per_byte_added": 1e-8})
        }
    )
    free, slow = link_from_cluster(FREE), link_from_cluster(busy)
    assert slow.latency_s > 2 * free.latency_s
    assert slow.bytes_per_s < free.bytes_per_s


def test_a_link_from_costs_reproduces_these_costs():
    mesh = Mesh((2, 2))
    across, inside = LatencyBandwidth(3e-3, 5e-9), LatencyBandwidth(1e-3, 2e-9)
    link = link_from_costs(mesh, across, inside)
    assert link.all_ranks_s(1e8) == pytest.approx(3e-3 + 0.5)
    assert link.in_host_s(1e8) == pytest.approx(1e-3 + 0.2)
    flat = link_from_costs(Mesh((1,) * 4), across)
    assert flat.all_ranks_s(1e8) == pytest.approx(3e-3 + 0.5)


def test_a_link_between_hosts_keeps_a_positive_rate():
    link = link_from_costs(Mesh((2, 2)), LatencyBandwidth(1e-3, 1e-9), LatencyBandwidth(2e-3, 9e-9))
    assert link.latency_s == 0
    assert link.bytes_per_s > 0


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "unit_bytes"),
    [
        (1e-3, 1e9, 9_000_000),  # 10 ms, of which 9 are bytes
        (1e-6, 1e9, 1_000_000),
        (1.0, 1e9, 500_000_000),
    ],
)
def test_units_are_joined_until_latency_is_a_tenth(latency_s, bytes_per_s, unit_bytes):
    assert (
        worthwhile_unit_bytes(Link(ranks=4, latency_s=latency_s, bytes_per_s=bytes_per_s))
        == unit_bytes
    )


def test_a_cluster_is_a_name_or_a_file(tmp_path):
    assert load_cluster_or_preset("box 400mbit") == preset("box 400mbit")
    FREE.write(tmp_path / "cluster.toml")
    assert load_cluster_or_preset(str(tmp_path / "cluster.toml")) == FREE
    with pytest.raises(ConfigError, match="stretto calibrate"):
        load_cluster_or_preset(str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match="box 400mbit"):
        load_cluster_or_preset("box 400mbi")

import pytest

from stretto.cluster.world import Mesh
from stretto.comm.algorithms.table import parse_table
from stretto.sim import Cluster, Transport, preset
from stretto.sim.fusion import block_bytes, fusion_threshold


def cluster(latency_s, bytes_per_s, ranks=2):
    line = Transport(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return Cluster(ranks_per_host=(1,) * ranks, between=line, inside=line)


@pytest.mark.parametrize("efficiency", [0.5, 0.8, 0.9])
def test_a_block_reaches_its_share_of_the_rate(efficiency):
    latency_s, bytes_per_s = 1e-3, 1e8
    block = block_bytes(latency_s, bytes_per_s, efficiency)
    reached = block / (latency_s + block / bytes_per_s)
    assert reached == pytest.approx(efficiency * bytes_per_s)


def test_a_threshold_is_the_block_of_what_the_table_sends():
    # Two ranks that exchange all: one latency, and each byte once.
    where = cluster(1e-3, 1e8)
    assert fusion_threshold(where, parse_table("doubling")) == 4_900_000
    # Around a ring of two: two latencies, and half of each byte twice.
    assert fusion_threshold(where, parse_table("ring")) == 9_800_000


def test_the_table_is_asked_for_large_messages():
    where = cluster(1e-3, 1e8, ranks=4)
    mixed = parse_table("doubling, ring from 1MB")
    assert fusion_threshold(where, mixed) == fusion_threshold(where, parse_table("ring"))


def test_a_threshold_stays_within_reason():
    table = parse_table("ring")
    assert fusion_threshold(cluster(0, 1e9), table) == 64_000
    assert fusion_threshold(cluster(1.0, 1e9), table) == 64_000_000


def test_more_ranks_want_larger_messages():
    few, many = (preset("ethernet 10gbit").with_mesh(Mesh((1,) * n)) for n in (2, 8))
    table = parse_table("ring")
    assert fusion_threshold(few, table) < fusion_threshold(many, table)

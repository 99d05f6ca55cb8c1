"""The bucket size reaches the chosen share of the link's rate."""

import pytest

from stretto.cluster.world import Mesh
from stretto.collectives.algorithm_table import parse_table
from stretto.simulator import Cluster, LinkCosts, preset
from stretto.simulator.algorithm_choice import choose_bucket_bytes, min_efficient_bytes


def cluster(latency_s, bytes_per_s, ranks=2):
    line = LinkCosts(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return Cluster(ranks_per_host=(1,) * ranks, between=line, inside=line)


@pytest.mark.parametrize("efficiency", [0.5, 0.8, 0.9])
def test_a_message_of_the_minimal_size_reaches_its_share_of_the_rate(efficiency):
    latency_s, bytes_per_s = 1e-3, 1e8
    num_bytes = min_efficient_bytes(latency_s, bytes_per_s, efficiency)
    reached = num_bytes / (latency_s + num_bytes / bytes_per_s)
    assert reached == pytest.approx(efficiency * bytes_per_s)


def test_the_bucket_size_depends_on_the_algorithm_of_the_table():
    # Two ranks that exchange everything: one latency, and each byte once.
    where = cluster(1e-3, 1e8)
    assert choose_bucket_bytes(where, parse_table("doubling")) == 4_900_000
    # Around a ring of two: two latencies, and half of each byte twice.
    assert choose_bucket_bytes(where, parse_table("ring")) == 9_800_000


def test_the_algorithm_for_large_messages_determines_the_bucket_size():
    where = cluster(1e-3, 1e8, ranks=4)
    mixed = parse_table("doubling, ring from 1MB")
    assert choose_bucket_bytes(where, mixed) == choose_bucket_bytes(where, parse_table("ring"))


def test_the_bucket_size_is_limited():
    table = parse_table("ring")
    assert choose_bucket_bytes(cluster(0, 1e9), table) == 64_000
    assert choose_bucket_bytes(cluster(1.0, 1e9), table) == 64_000_000


def test_more_ranks_need_larger_buckets():
    few, many = (preset("ethernet 10gbit").with_mesh(Mesh((1,) * n)) for n in (2, 8))
    table = parse_table("ring")
    assert choose_bucket_bytes(few, table) < choose_bucket_bytes(many, table)

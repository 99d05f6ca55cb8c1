"""Cluster descriptions from measurements, and tables of the fastest algorithms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.bench.calibrate import (
    CalibrationOptions,
    FastestAlgorithm,
    broadcast_cluster,
    build_table,
    calibrate,
    describe_cluster,
    pick_fastest,
)
from stretto.cluster.world import Mesh, World
from stretto.collectives.algorithm_table import parse_table
from stretto.collectives.algorithms import ALLREDUCE
from stretto.comm.in_process_transports import run_threads
from stretto.profiler.links import LinkMeasurements, MeasuredLinkCost
from stretto.simulator.algorithm_choice import TABLE_SIZES, assumed_cluster
from stretto.simulator.cluster import load_cluster, preset

OUT = MeasuredLinkCost(
    latency_s=300e-6,
    bytes_per_s=40e6,
    core_s_per_byte=1.5e-9,
    core_s_per_message=100e-6,
    buffered_bytes=2e6,
    queued_bytes=1e5,
)
IN = MeasuredLinkCost(
    latency_s=80e-6,
    bytes_per_s=1e9,
    core_s_per_byte=0.5e-9,
    core_s_per_message=50e-6,
    buffered_bytes=0.0,
    queued_bytes=0.0,
)
PREVIOUS = preset("ethernet 10gbit").model_copy(update={"tables": {"9x9": "ring"}})


def links(between=OUT, inside=IN, *, native_s=0.02, machines=1) -> LinkMeasurements:
    return LinkMeasurements(
        between,
        inside,
        core_s_per_byte_added=0.3e-9,
        native_s=native_s,
        machines=machines,
        cores=6,
    )


def test_a_description_contains_all_measurements():
    cluster = describe_cluster(links(), Mesh((2, 2)), PREVIOUS)
    assert cluster.mesh == Mesh((2, 2))
    # The CPU time of a message is a separate cost, so it is subtracted from the latency.
    assert cluster.between.latency_s == pytest.approx(200e-6)
    assert cluster.inside.latency_s == pytest.approx(30e-6)
    assert (cluster.between.bytes_per_s, cluster.inside.bytes_per_s) == (40e6, 1e9)
    cpu = cluster.cpu
    assert (cpu.s_per_byte_between, cpu.s_per_byte_inside) == (1.5e-9, 0.5e-9)
    assert (cpu.s_per_byte_added, cpu.s_per_message, cpu.cores) == (0.3e-9, 100e-6, 6)


def test_one_host_keeps_the_previous_links_between_hosts():
    cluster = describe_cluster(links(between=None), Mesh((4,)), PREVIOUS)
    assert cluster.between == PREVIOUS.between
    assert cluster.cpu.s_per_byte_between == PREVIOUS.cpu.s_per_byte_between
    assert cluster.inside.bytes_per_s == 1e9
    assert cluster.cpu.s_per_message == 50e-6
    assert cluster.tables == PREVIOUS.tables


def test_hosts_of_one_rank_keep_the_previous_links_inside_hosts():
    cluster = describe_cluster(links(inside=None), Mesh((1, 1, 1)), PREVIOUS)
    assert cluster.inside == PREVIOUS.inside
    assert cluster.cpu.s_per_byte_inside == PREVIOUS.cpu.s_per_byte_inside
    assert cluster.between.bytes_per_s == 40e6


@pytest.mark.parametrize(
    ("mesh", "machines", "pool"),
    [(Mesh((2, 2)), 1, "shared"), (Mesh((2, 2)), 2, "host"), (Mesh((4,)), 1, "host")],
)
def test_hosts_on_one_machine_share_its_cores(mesh, machines, pool):
    assert describe_cluster(links(machines=machines), mesh, PREVIOUS).cpu.pool == pool


def test_the_native_latency_is_the_time_that_its_messages_do_not_explain():
    slow = describe_cluster(links(native_s=0.05), Mesh((2, 2)), PREVIOUS)
    slower = describe_cluster(links(native_s=0.06), Mesh((2, 2)), PREVIOUS)
    assert slower.native_latency_s - slow.native_latency_s == pytest.approx(0.01)
    assert 0 < slow.native_latency_s < 0.05
    assert describe_cluster(links(native_s=0.0), Mesh((2, 2)), PREVIOUS).native_latency_s == 0.0


def test_calibrations_of_several_shapes_add_up_in_one_file(tmp_path):
    path = tmp_path / "cluster.toml"
    describe_cluster(links(between=None), Mesh((4,)), PREVIOUS).write(path)
    describe_cluster(links(inside=None), Mesh((1, 1)), load_cluster(path)).write(path)
    both = load_cluster(path)
    assert (both.between.bytes_per_s, both.inside.bytes_per_s) == (40e6, 1e9)
    assert both.tables == {"9x9": "ring"}
    assert both.mesh == Mesh((1, 1))


def test_all_ranks_use_the_description_of_rank_0():
    def work(transport):
        local = describe_cluster(links(native_s=0.02 + transport.rank), transport.mesh, PREVIOUS)
        return broadcast_cluster(local, transport), local

    ranks = run_threads(Mesh((2, 1)), work)
    assert [received for received, _ in ranks] == [ranks[0][1]] * 3
    assert ranks[0][1] != ranks[1][1]


def test_a_calibration_times_the_likely_algorithms_of_rank_0(monkeypatch):
    """Only rank 0 has a previous description, because not every disk is shared."""
    transports = {}
    monkeypatch.setattr("torch.set_num_threads", lambda _threads: None)
    monkeypatch.setattr("stretto.bench.calibrate.connect", lambda w, **_: transports[w.rank])
    monkeypatch.setattr("stretto.bench.calibrate.TABLE_SIZES", (1_000, 2_000_000))
    odd = preset("gpu nodes 100gbit").model_copy(update={"tables": {"9x9": "ring"}})

    def work(transport):
        transports[transport.rank] = transport
        previous = odd if transport.rank == 0 else None
        lines = []
        found = calibrate(
            World(transport.rank, transport.mesh),
            previous,
            CalibrationOptions(runs=1),
            lines.append,
        )
        return found, lines

    (first, lines), *others = run_threads(Mesh((2, 1)), work)
    assert all(other == (first, lines) for other in others)
    assert [row.num_bytes for row in first.rows] == [1_000, 2_000_000]
    assert first.cluster.tables == {"9x9": "ring", "2+1": str(build_table(first.rows))}
    assert first.cluster.name == odd.name
    assert any(line.startswith("2 MB: ") for line in lines)


def test_the_fastest_algorithm_is_picked_with_the_runner_up():
    row = pick_fastest(
        1_000_000, {"ring": 3.0, "doubling": 1.0, "native": 2.0}, previous_winner=None
    )
    assert row == FastestAlgorithm(1_000_000, "doubling", 1.0, "native", 2.0)
    assert row.reason == "1 s at 1 MB; next best native with 2 s"


@pytest.mark.parametrize(
    ("seconds", "winner"), [(1.0, "ring"), (1.02, "ring"), (1.04, "doubling"), (9.0, "doubling")]
)
def test_the_previous_winner_is_kept_if_it_is_as_fast(seconds, winner):
    row = pick_fastest(4_000, {"doubling": 1.0, "ring": seconds}, previous_winner="ring")
    assert row.word == winner
    assert row.runner_up != winner


def test_a_previous_winner_that_was_not_timed_is_dropped():
    assert pick_fastest(4_000, {"doubling": 1.0}, previous_winner="ring").word == "doubling"


def test_a_single_algorithm_is_its_own_runner_up():
    assert pick_fastest(4_000, {"ring": 1.0}, previous_winner=None).runner_up == "ring"


def measured(*algorithms: str) -> tuple[FastestAlgorithm, ...]:
    return tuple(
        FastestAlgorithm(*pair, 1.0, "", 1.0) for pair in zip(TABLE_SIZES, algorithms, strict=False)
    )


def test_a_row_begins_at_the_geometric_mean_of_two_sizes():
    rows = measured(*["doubling"] * 4, "ring", "ring", "ring/2", "hierarchical/8")
    assert str(build_table(rows)) == (
        "doubling, ring from 128KB, ring/2 from 2MB, hierarchical/8 from 8MB"
    )


algorithms_in_parts = st.tuples(st.sampled_from(sorted(ALLREDUCE)), st.integers(1, 16))


@given(st.lists(algorithms_in_parts, min_size=1, max_size=len(TABLE_SIZES)))
def test_the_table_gives_every_measured_size_its_winner(names):
    texts = [name if parts == 1 else f"{name}/{parts}" for name, parts in names]
    table = build_table(measured(*texts))
    assert [table.pick(size).word for size, _ in zip(TABLE_SIZES, texts, strict=False)] == texts
    assert table.choices[0].min_bytes == 0
    assert parse_table(str(table)) == table


def test_the_assumed_cluster_uses_the_rate_of_a_lab():
    assert assumed_cluster(Mesh((2, 2)), None).name == "ethernet 10gbit"
    lab = assumed_cluster(Mesh((2, 2)), 80_000_000)
    assert lab.between.bytes_per_s == pytest.approx(9.5e6)
    assert lab.mesh == Mesh((2, 2))

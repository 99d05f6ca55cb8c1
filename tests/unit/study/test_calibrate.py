"""From measurements to a description: what was met is taken, what was not is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.cluster.world import Mesh, World
from stretto.comm.algorithms import ALLREDUCE
from stretto.comm.algorithms.table import parse_table
from stretto.comm.local import run_local
from stretto.measure.links import Cost, Links
from stretto.sim.choosing import SIZES, described
from stretto.sim.cluster import load_cluster
from stretto.sim.presets import preset
from stretto.study.calibrate import How, Measured, calibrate, describe, of_rank_0, pick, table_of

OUT = Cost(
    latency_s=300e-6,
    bytes_per_s=40e6,
    core_s_per_byte=1.5e-9,
    core_s_per_message=100e-6,
    buffered_bytes=2e6,
    queued_bytes=1e5,
)
IN = Cost(
    latency_s=80e-6,
    bytes_per_s=1e9,
    core_s_per_byte=0.5e-9,
    core_s_per_message=50e-6,
    buffered_bytes=0.0,
    queued_bytes=0.0,
)
KNOWN = preset("ethernet 10gbit").model_copy(update={"tables": {"9x9": "ring"}})


def links(between=OUT, inside=IN, *, native_s=0.02, machines=1) -> Links:
    return Links(
        between,
        inside,
        core_s_per_byte_added=0.3e-9,
        native_s=native_s,
        machines=machines,
        cores=6,
    )


def test_everything_that_was_measured_is_in_the_description():
    cluster = describe(links(), Mesh((2, 2)), KNOWN)
    assert cluster.mesh == Mesh((2, 2))
    # A message's work for the cores is charged by itself, so it is no part of the latency.
    assert cluster.between.latency_s == pytest.approx(200e-6)
    assert cluster.inside.latency_s == pytest.approx(30e-6)
    assert (cluster.between.bytes_per_s, cluster.inside.bytes_per_s) == (40e6, 1e9)
    cpu = cluster.cpu
    assert (cpu.s_per_byte_between, cpu.s_per_byte_inside) == (1.5e-9, 0.5e-9)
    assert (cpu.s_per_byte_added, cpu.s_per_message, cpu.cores) == (0.3e-9, 100e-6, 6)


def test_one_host_keeps_what_was_known_of_links_between_hosts():
    cluster = describe(links(between=None), Mesh((4,)), KNOWN)
    assert cluster.between == KNOWN.between
    assert cluster.cpu.s_per_byte_between == KNOWN.cpu.s_per_byte_between
    assert cluster.inside.bytes_per_s == 1e9
    assert cluster.cpu.s_per_message == 50e-6
    assert cluster.tables == KNOWN.tables


def test_hosts_of_one_rank_keep_what_was_known_of_messages_inside():
    cluster = describe(links(inside=None), Mesh((1, 1, 1)), KNOWN)
    assert cluster.inside == KNOWN.inside
    assert cluster.cpu.s_per_byte_inside == KNOWN.cpu.s_per_byte_inside
    assert cluster.between.bytes_per_s == 40e6


@pytest.mark.parametrize(
    ("mesh", "machines", "pool"),
    [(Mesh((2, 2)), 1, "shared"), (Mesh((2, 2)), 2, "host"), (Mesh((4,)), 1, "host")],
)
def test_hosts_that_are_one_machine_share_its_cores(mesh, machines, pool):
    assert describe(links(machines=machines), mesh, KNOWN).cpu.pool == pool


def test_the_back_ends_sum_costs_what_its_messages_do_not_explain():
    slow = describe(links(native_s=0.05), Mesh((2, 2)), KNOWN)
    slower = describe(links(native_s=0.06), Mesh((2, 2)), KNOWN)
    assert slower.native_latency_s - slow.native_latency_s == pytest.approx(0.01)
    assert 0 < slow.native_latency_s < 0.05
    assert describe(links(native_s=0.0), Mesh((2, 2)), KNOWN).native_latency_s == 0.0


def test_measured_shape_after_shape_one_file_holds_all_of_it(tmp_path):
    path = tmp_path / "cluster.toml"
    describe(links(between=None), Mesh((4,)), KNOWN).write(path)
    describe(links(inside=None), Mesh((1, 1)), load_cluster(path)).write(path)
    both = load_cluster(path)
    assert (both.between.bytes_per_s, both.inside.bytes_per_s) == (40e6, 1e9)
    assert both.tables == {"9x9": "ring"}
    assert both.mesh == Mesh((1, 1))


def test_ranks_that_know_different_things_go_on_with_what_rank_0_knows():
    def work(channel):
        mine = describe(links(native_s=0.02 + channel.rank), channel.mesh, KNOWN)
        return of_rank_0(mine, channel), mine

    ranks = run_local(Mesh((2, 1)), work)
    assert [told for told, _ in ranks] == [ranks[0][1]] * 3
    assert ranks[0][1] != ranks[1][1]


def test_a_calibration_times_what_rank_0s_description_puts_first(monkeypatch):
    """On one rank alone the file is there: not every disk is shared."""
    channels = {}
    monkeypatch.setattr("torch.set_num_threads", lambda _threads: None)
    monkeypatch.setattr("stretto.study.calibrate.connect", lambda w, **_: channels[w.rank])
    monkeypatch.setattr("stretto.study.calibrate.SIZES", (1_000, 2_000_000))
    odd = preset("gpu nodes 100gbit").model_copy(update={"tables": {"9x9": "ring"}})

    def work(channel):
        channels[channel.rank] = channel
        known = odd if channel.rank == 0 else None
        said = []
        found = calibrate(World(channel.rank, channel.mesh), known, How(runs=1), said.append)
        return found, said

    (first, said), *others = run_local(Mesh((2, 1)), work)
    assert all(other == (first, said) for other in others)
    assert [row.num_bytes for row in first.rows] == [1_000, 2_000_000]
    assert first.cluster.tables == {"9x9": "ring", "2+1": str(table_of(first.rows))}
    assert first.cluster.name == odd.name
    assert any(line.startswith("2 MB: ") for line in said)


def test_the_fastest_wins_and_the_next_is_told():
    row = pick(1_000_000, {"ring": 3.0, "doubling": 1.0, "native": 2.0}, before=None)
    assert row == Measured(1_000_000, "doubling", 1.0, "native", 2.0)
    assert row.reason == "1 s at 1 MB; next best native with 2 s"


@pytest.mark.parametrize(
    ("seconds", "winner"), [(1.0, "ring"), (1.02, "ring"), (1.04, "doubling"), (9.0, "doubling")]
)
def test_who_won_before_wins_again_if_it_is_as_good(seconds, winner):
    row = pick(4_000, {"doubling": 1.0, "ring": seconds}, before="ring")
    assert row.word == winner
    assert row.runner_up != winner


def test_who_won_before_but_was_not_timed_is_out():
    assert pick(4_000, {"doubling": 1.0}, before="ring").word == "doubling"


def test_alone_it_is_its_own_runner_up():
    assert pick(4_000, {"ring": 1.0}, before=None).runner_up == "ring"


def measured(*words: str) -> tuple[Measured, ...]:
    return tuple(Measured(*pair, 1.0, "", 1.0) for pair in zip(SIZES, words, strict=False))


def test_a_row_begins_halfway_in_ratio_from_the_size_before():
    rows = measured(*["doubling"] * 4, "ring", "ring", "ring/2", "hierarchical/8")
    assert str(table_of(rows)) == (
        "doubling, ring from 128KB, ring/2 from 2MB, hierarchical/8 from 8MB"
    )


words = st.tuples(st.sampled_from(sorted(ALLREDUCE)), st.integers(1, 16))


@given(st.lists(words, min_size=1, max_size=len(SIZES)))
def test_the_table_gives_every_measured_size_its_winner(names):
    spoken = [name if parts == 1 else f"{name}/{parts}" for name, parts in names]
    table = table_of(measured(*spoken))
    assert [table.pick(size).word for size, _ in zip(SIZES, spoken, strict=False)] == spoken
    assert table.choices[0].least == 0
    assert parse_table(str(table)) == table


def test_where_nothing_is_known_a_labs_rate_is():
    assert described(Mesh((2, 2)), None).name == "ethernet 10gbit"
    lab = described(Mesh((2, 2)), 80_000_000)
    assert lab.between.bytes_per_s == pytest.approx(9.5e6)
    assert lab.mesh == Mesh((2, 2))

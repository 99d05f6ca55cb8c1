import pytest

from stretto.cluster.world import Mesh
from stretto.comm.algorithms import ALLREDUCE
from stretto.comm.algorithms.table import parse_table
from stretto.comm.schedule import pipelined
from stretto.sim import PRESETS, choosing, preset, price
from stretto.sim.book import PriceBook
from stretto.sim.catalogue import Choice
from stretto.sim.choosing import (
    LARGE,
    PARTS,
    SIZES,
    SMALL,
    choose_alone,
    choose_rows,
    choose_stream,
    choose_table,
    table_of,
)

SHAPES = [(1,) * 4, (2, 2), (3, 1)]


def refused(*_):
    raise AssertionError("nothing is to be priced here")


def seconds(cluster, name, parts, size):
    return price(ALLREDUCE[name](cluster.mesh, parts), size, cluster).seconds


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PRESETS)
def test_the_choice_is_within_a_hundredth_of_the_cheapest_at_every_size(name, shape):
    cluster = preset(name).with_mesh(Mesh(shape))
    table = choose_table(cluster, cluster.mesh)
    for size in SIZES:
        mine = table.pick(size)
        whole = [seconds(cluster, other, 1, size) for other in ALLREDUCE]
        assert seconds(cluster, mine.name, mine.parts, size) <= 1.01 * min(whole)
        if size in LARGE:
            for parts in PARTS:
                assert seconds(cluster, mine.name, mine.parts, size) <= 1.01 * seconds(
                    cluster, mine.name, parts, size
                )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_leaving_out_what_is_out_of_the_question_leaves_out_nothing_near(shape):
    cluster = preset("ethernet 10gbit").with_mesh(Mesh(shape))
    book = PriceBook(cluster, ALLREDUCE)
    whole = book.candidates((1,))
    for within in (1.01, 1.5):
        near = PriceBook(cluster, ALLREDUCE).near(whole, SIZES, within)
        for size in SIZES:
            every = book.every(whole, [size]).rows
            limit_s = within * every[0].price.seconds
            wanted = [row.name for row in every if row.price.seconds <= limit_s]
            assert [row.name for row in near.at(size)] == wanted


def test_much_is_never_priced(monkeypatch):
    cluster = preset("ethernet 10gbit").with_mesh(Mesh((4,) * 4))
    priced = []
    row = PriceBook.row

    def counted(book, candidate, num_bytes):
        priced.append((candidate, num_bytes))
        return row(book, candidate, num_bytes)

    monkeypatch.setattr(PriceBook, "row", counted)
    choose_table(cluster, cluster.mesh)
    everything = len(ALLREDUCE) * (len(SMALL) + len(LARGE) * len(PARTS))
    assert len(set(priced)) < everything / 2


def test_a_table_that_was_measured_is_taken_as_it_is(monkeypatch):
    measured = "doubling, native from 8KB, hierarchical/8 from 1MB"
    cluster = preset("box 400mbit").model_copy(update={"tables": {"2x2": measured}})
    monkeypatch.setattr(choosing, "choose_rows", refused)
    assert choose_table(cluster, Mesh((2, 2))) == parse_table(measured)


def test_a_measured_table_with_the_back_end_s_own_is_not_taken_where_it_cannot_be_used():
    cluster = preset("box 400mbit").model_copy(update={"tables": {"2x2": "native"}})
    table = choose_table(cluster, Mesh((2, 2)), native=False)
    assert "native" not in [choice.name for choice in table.choices]


def test_one_host_that_nobody_described_uses_the_back_end_s_own(monkeypatch):
    monkeypatch.setattr(choosing, "choose_rows", refused)
    assert str(choose_table(None, Mesh((4,)))) == "native"
    assert str(choose_table(None, Mesh((4,)), native=False)) == "ring"


def test_several_hosts_that_nobody_described_are_taken_to_be_joined_by_ethernet():
    mesh = Mesh((2, 2))
    assert choose_table(None, mesh) == choose_table(preset("ethernet 10gbit"), mesh)


def test_the_back_end_s_own_is_left_out_where_it_cannot_be_used(monkeypatch):
    monkeypatch.setattr(choosing, "ALLREDUCE", {n: ALLREDUCE[n] for n in ("native", "doubling")})
    cluster, mesh = preset("ethernet 10gbit"), Mesh((1,) * 6)
    assert choose_table(cluster, mesh).pick(10**9).name == "native"
    names = {choice.name for choice in choose_table(cluster, mesh, native=False).choices}
    assert names == {"doubling"}


def test_rows_tell_why_and_a_table_reads_back_as_itself():
    cluster = preset("gpu nodes 100gbit").with_mesh(Mesh((4, 4)))
    rows = choose_rows(cluster)
    assert all(row.reason for row in rows)
    assert rows[0].reason == "3 serial messages instead of 14 with ring"
    table = table_of(rows)
    assert parse_table(str(table)) == table
    assert [choice.least for choice in table.choices] == [0, *(r.from_bytes for r in rows[1:])]
    assert all(choice.parts == 1 for choice in table.choices if choice.least < LARGE[0])


def test_a_table_begins_at_nothing():
    rows = [Choice(1_000, "doubling", 1, 0.1, ""), Choice(4_000_000, "ring", 2, 0.2, "")]
    assert str(table_of(rows)) == "doubling, ring/2 from 4MB"


def test_what_costs_the_same_but_for_rounding_is_a_tie_that_the_first_of_the_table_wins():
    # Hosts of two: halving begins inside them, so both do the same at the same times.
    cluster = preset("box 400mbit").with_mesh(Mesh((2,) * 8))
    book = PriceBook(cluster, ALLREDUCE)
    same = [(name, 1) for name in ("halving-doubling", "hierarchical-halving")]
    assert [row.name for row in book.every(same, [64_000]).rows] == [name for name, _ in same]


def test_in_a_row_lanes_beat_what_is_fastest_alone():
    """Alone, halving and doubling wins at 1 MB; of many in a row, phases on lanes overlap."""
    box, mesh = preset("box 400mbit"), Mesh((4, 4))
    stream = choose_stream(box, mesh)
    assert stream.pick(1_000_000).name.startswith("hierarchical")
    assert all(choice.parts == 1 for choice in stream.choices)
    where = box.with_mesh(mesh)

    def in_a_row(name):
        return price(pipelined(ALLREDUCE[name](mesh, 1), 8), 8_000_000, where).seconds

    best = min(in_a_row(name) for name in ALLREDUCE)
    assert in_a_row(stream.pick(1_000_000).name) <= 1.01 * best


def test_in_a_row_one_undescribed_host_is_left_to_the_back_end():
    assert str(choose_stream(None, Mesh((4,)))) == "native"
    assert "native" not in str(choose_stream(None, Mesh((4,)), native=False))


@pytest.mark.parametrize("native", [True, False])
def test_each_of_a_few_sizes_may_be_chosen_for_by_itself(native):
    cluster = preset("ethernet 10gbit").with_mesh(Mesh((2,) * 4))
    sizes = (10_000, 4_000_000)
    table = choose_alone(cluster, sizes, native=native)
    known = [name for name in ALLREDUCE if native or name != "native"]
    for size in sizes:
        mine = table.pick(size)
        assert mine.parts == 1
        cheapest_s = min(seconds(cluster, name, 1, size) for name in known)
        assert seconds(cluster, mine.name, 1, size) <= 1.01 * cheapest_s
    assert table.pick(0) == table.pick(sizes[0])

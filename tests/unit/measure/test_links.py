"""Measuring links, with ranks as threads: figures that could be, and the pairs that are timed."""

import pytest

from stretto.cluster.world import Mesh
from stretto.comm.local import run_local
from stretto.measure.links import _neighbours, measure_links


@pytest.mark.parametrize(
    ("mesh", "between", "inside"), [((2,), 0, 1), ((1, 1), 1, 0), ((2, 1), 1, 1)]
)
def test_what_there_is_is_measured_and_every_figure_is_positive(mesh, between, inside):
    said = []
    ranks = run_local(Mesh(mesh), lambda c: measure_links(c, said.append if c.rank == 0 else str))
    links = ranks[0]
    assert (links.between is not None, links.inside is not None) == (bool(between), bool(inside))
    for cost in filter(None, (links.between, links.inside)):
        figures = (cost.latency_s, cost.bytes_per_s, cost.core_s_per_byte, cost.core_s_per_message)
        assert all(figure > 0 for figure in figures)
    assert links.native_s > 0
    assert links.core_s_per_byte_added > 0
    assert (links.machines, links.cores >= 1) == (1, True)
    assert len(said) == 1 + between + inside
    # What is timed between ranks is the same for all of them.
    assert all((r.between, r.inside) == (links.between, links.inside) for r in ranks)


@pytest.mark.parametrize(
    ("mesh", "pairs"),
    [
        ((2,), {0: 1, 1: 0}),
        ((3,), {0: 1, 1: 0}),
        ((1, 3, 2), {1: 2, 2: 1, 4: 5, 5: 4}),
        ((1, 1), {}),
    ],
)
def test_neighbours_are_pairs_inside_hosts(mesh, pairs):
    assert _neighbours(Mesh(mesh)) == pairs

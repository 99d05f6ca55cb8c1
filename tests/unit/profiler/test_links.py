"""Measuring links with ranks as threads: positive figures, and the pairs that are timed."""

import pytest

from stretto.cluster.world import Mesh
from stretto.comm.in_process_transports import run_threads
from stretto.profiler.links import measure_links, pair_local_ranks


@pytest.mark.parametrize(
    ("mesh", "between", "inside"), [((2,), 0, 1), ((1, 1), 1, 0), ((2, 1), 1, 1)]
)
def test_existing_links_are_measured_and_all_figures_are_positive(mesh, between, inside):
    lines = []
    ranks = run_threads(
        Mesh(mesh), lambda c: measure_links(c, lines.append if c.rank == 0 else str)
    )
    links = ranks[0]
    assert (links.between is not None, links.inside is not None) == (bool(between), bool(inside))
    for cost in filter(None, (links.between, links.inside)):
        figures = (cost.latency_s, cost.bytes_per_s, cost.core_s_per_byte, cost.core_s_per_message)
        assert all(figure > 0 for figure in figures)
    assert links.native_s > 0
    assert links.core_s_per_byte_added > 0
    assert (links.machines, links.cores >= 1) == (1, True)
    assert len(lines) == 1 + between + inside
    # All ranks get the same measurements.
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
def test_neighbours_inside_hosts_are_paired(mesh, pairs):
    assert pair_local_ranks(Mesh(mesh)) == pairs

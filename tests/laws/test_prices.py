"""Laws of every predicted time: shortcuts by symmetry, repetition and formulas are exact."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from stretto.cluster.world import Mesh
from stretto.collectives.algorithms import ALLREDUCE
from stretto.collectives.schedule import Action
from stretto.errors import StrettoError
from stretto.simulator import (
    Cluster,
    Cpu,
    LinkCosts,
    closed_form,
    predict_timelines,
    price,
    serial_steps,
)
from stretto.simulator.closed_forms import FORMULAS
from stretto.simulator.event_engine import run_task_by_task, run_vectorized
from stretto.simulator.expanded_schedule import expand, host_symmetry
from stretto.simulator.message_costs import cost_resources
from stretto.simulator.price_cache import PriceLowerBound, lower_bound_in_parts
from stretto.telemetry.timeline import busy_s

TIGHT = 1e-9
EVEN = [(1,) * 2, (1,) * 6, (1,) * 7, (4,), (2, 2), (4, 4), (3, 3, 3, 3), (2,) * 8]
UNEVEN = [(3, 1, 4), (1, 4), (5, 2)]
COSTLY = Cpu(
    cores=2,
    s_per_byte_between=3e-9,
    s_per_byte_inside=2e-9,
    s_per_message=2e-5,
    s_per_byte_added=1e-9,
)


KERNELS = [{}, {"buffered_bytes": 3e5, "queued_bytes": 2e4}]
"""Buffering of messages between hosts by the kernel: none, or as measured in a lab."""


def cluster(shape, cpu=COSTLY, kernel=KERNELS[0], **more):
    return Cluster(
        ranks_per_host=shape,
        between=LinkCosts(latency_s=1e-4, bytes_per_s=1e8, **kernel),
        inside=LinkCosts(latency_s=1e-5, bytes_per_s=1e9),
        cpu=cpu,
        **more,
    )


def free(shape):
    """Return a cluster in which only the costs of the papers' formulas are not zero."""
    return cluster(shape, Cpu(cores=64, s_per_byte_added=1e-9))


@pytest.mark.parametrize(("pool", "kernel"), [*zip(["host", "shared"], KERNELS, strict=True)])
@pytest.mark.parametrize("shape", EVEN)
@pytest.mark.parametrize("name", ALLREDUCE)
def test_a_price_by_representatives_equals_the_price_of_all_ranks(name, shape, pool, kernel):
    where = cluster(shape, COSTLY.model_copy(update={"pool": pool}), kernel)
    for parts in (1, 3):
        schedule = ALLREDUCE[name](where.mesh, parts)
        if schedule.period is None and schedule.rotation_block is None:
            continue
        for num_bytes in (40, 4_000_000):  # fewer elements than chunks, and many more
            by_some = price(schedule, num_bytes, where)
            by_all = price(replace(schedule, period=None, rotation_block=None), num_bytes, where)
            assert by_some.seconds == pytest.approx(by_all.seconds, rel=TIGHT)
            assert by_some.bytes_per_link == pytest.approx(by_all.bytes_per_link, rel=TIGHT)
            assert by_some.core_s == pytest.approx(by_all.core_s, rel=TIGHT)


@pytest.mark.parametrize("pool", ["host", "shared"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("ring", (1,) * 400),
        ("ring", (2,) * 150),
        ("hierarchical", (2,) * 300),
        ("masters", (3,) * 250),
        ("torus", (1,) * 401),
    ],
)
def test_skipped_repetitions_of_rounds_do_not_change_the_price(name, shape, pool):
    where = cluster(shape, COSTLY.model_copy(update={"pool": pool}))
    schedule = ALLREDUCE[name](where.mesh, 1)
    whole = cost_resources(expand(schedule, host_symmetry(schedule, where.mesh)), 10**8, where)
    expected = run_task_by_task(whole.tasks).seconds
    assert price(schedule, 10**8, where).seconds == pytest.approx(expected, rel=TIGHT)


@pytest.mark.parametrize(("pool", "kernel"), [*zip(["host", "shared"], KERNELS, strict=True)])
@pytest.mark.parametrize("shape", [(1,) * 7, (4,), (3, 3, 3), (2,) * 4, (3, 1, 4)])
@pytest.mark.parametrize("name", ALLREDUCE)
def test_no_price_is_below_its_lower_bound(name, shape, pool, kernel):
    cpu = COSTLY.model_copy(update={"pool": pool})
    where = cluster(shape, cpu, kernel, native_latency_s=1e-3)
    for num_bytes in (40, 4_000, 4_000_000):
        for parts in (1, 3):
            schedule = ALLREDUCE[name](where.mesh, parts)
            priced = price(schedule, num_bytes, where)
            bound_s = PriceLowerBound(schedule, where).seconds(num_bytes)
            assert 0 < bound_s <= priced.seconds * (1 + TIGHT)
            if parts == 1:
                whole = priced
            elif num_bytes >= 4 * schedule.num_chunks and not schedule.native:
                assert lower_bound_in_parts(whole, parts, where) <= priced.seconds * (1 + TIGHT)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [*EVEN, *UNEVEN])
@pytest.mark.parametrize("name", ALLREDUCE)
def test_both_loops_of_the_engine_agree(name, shape, kernel):
    where = cluster(shape, kernel=kernel)
    schedule = ALLREDUCE[name](where.mesh, 2)
    tasks = cost_resources(expand(schedule), 1_000_003, where).tasks
    one, other = run_task_by_task(tasks), run_vectorized(tasks)
    np.testing.assert_allclose(one.end_s, other.end_s, rtol=TIGHT)
    np.testing.assert_allclose(one.start_s, other.start_s, rtol=TIGHT)


FORMULA_BYTES = 720_720 * 4
FORMULA_SHAPES = [*((1,) * n for n in range(1, 17)), (2, 2), (4, 4, 4), (3,) * 5]
FORMULA_CASES = [
    (name, shape)
    for name in FORMULAS
    for shape in FORMULA_SHAPES
    if closed_form(name, FORMULA_BYTES, free(shape)) is not None
]


def test_every_formula_has_cases():
    counts = Counter(name for name, _ in FORMULA_CASES)
    assert counts.keys() == FORMULAS.keys()
    assert min(counts.values()) >= 3
    assert len(FORMULA_CASES) >= 150


@pytest.mark.parametrize(("name", "shape"), FORMULA_CASES)
def test_a_price_equals_the_formula(name, shape):
    where = free(shape)
    priced = price(ALLREDUCE[name](where.mesh, 1), FORMULA_BYTES, where)
    assert priced.seconds == pytest.approx(closed_form(name, FORMULA_BYTES, where), rel=TIGHT)


def test_every_formula_belongs_to_an_algorithm_in_the_table():
    assert set(FORMULAS) <= set(ALLREDUCE)
    assert closed_form("ring", 1000, free((2, 2))) is None
    assert closed_form("hierarchical", 1000, free((2, 3))) is None


@pytest.mark.parametrize("shape", [(1,) * 5, (2, 2), (3, 1, 4)])
@pytest.mark.parametrize("name", ALLREDUCE)
def test_a_price_is_never_below_the_time_of_links_and_cores(name, shape):
    where = cluster(shape)
    last = 0.0
    for num_bytes in (0, 400, 40_000, 4_000_000):
        priced = price(ALLREDUCE[name](where.mesh, 1), num_bytes, where)
        assert max(priced.utilization.values()) <= 1 + TIGHT
        assert priced.seconds >= priced.bytes_per_link / where.between.bytes_per_s
        assert sum(priced.breakdown_s.values()) == pytest.approx(priced.seconds, rel=1e-6)
        assert priced.seconds >= last
        last = priced.seconds


@pytest.mark.parametrize("shape", [(1,) * 5, (2, 2), (3, 1, 4)])
@pytest.mark.parametrize("name", ALLREDUCE)
def test_the_busiest_link_carries_the_bytes_that_the_programs_send(name, shape):
    where = cluster(shape)
    schedule = ALLREDUCE[name](where.mesh, 1)
    carried = dict.fromkeys(range(where.mesh.hosts), 0.0)
    for rank in range(schedule.size):
        host = where.mesh.host_of(rank)
        for op in schedule.program(rank):
            if op.action is Action.SEND and where.mesh.host_of(op.peer) != host:
                carried[host] += (op.stop - op.start) * 4e6 / schedule.num_chunks
    assert price(schedule, 4_000_000, where).bytes_per_link == pytest.approx(max(carried.values()))


@pytest.mark.parametrize("name", ALLREDUCE)
def test_a_single_rank_and_an_empty_tensor_cost_nothing(name):
    where = cluster((1,), native_latency_s=0.005)
    assert price(ALLREDUCE[name](where.mesh, 1), 4000, where).seconds == 0
    where = cluster((2, 2))
    assert price(ALLREDUCE[name](where.mesh, 1), 0, where).seconds == 0


@pytest.mark.parametrize("name", ALLREDUCE)
def test_a_predicted_timeline_ends_at_the_predicted_time(name):
    where = cluster((2, 2))
    schedule = ALLREDUCE[name](where.mesh, 2)
    timelines = predict_timelines(schedule, 4_000_000, where)
    spans = [span for timeline in timelines for span in timeline.spans]
    seconds = price(schedule, 4_000_000, where).seconds
    assert max(span.end_s for span in spans) == pytest.approx(seconds, rel=TIGHT)
    assert all(busy_s(timeline.spans) <= seconds * (1 + TIGHT) for timeline in timelines)


SERIAL = {
    "ring": lambda n, _k: 2 * (n - 1),
    "native": lambda n, _k: 2 * (n - 1),
    "gather-broadcast": lambda n, _k: 2 * (n - 1),
    "binomial": lambda n, _k: 2 * (n - 1).bit_length(),
    "doubling": lambda n, _k: (n - 1).bit_length(),
    "halving-doubling": lambda n, _k: 2 * (n - 1).bit_length(),
    "masters": lambda n, k: 4 * (k - 1) + 2 * (n // k - 1),
    "hierarchical": lambda n, k: 2 * (k - 1) + 2 * (n // k - 1),
    "torus": lambda n, _k: 2 * (2 * round(n**0.5) - 2),
}


@pytest.mark.parametrize("shape", [(1,) * 4, (4,) * 4, (8,) * 8, (8,) * 128])
@pytest.mark.parametrize("name", SERIAL)
def test_the_number_of_serial_steps_is_that_of_the_papers(name, shape):
    mesh = Mesh(shape)
    assert serial_steps(ALLREDUCE[name](mesh, 1)) == SERIAL[name](mesh.size, shape[0])


@pytest.mark.parametrize("name", ["ring", "hierarchical", "binomial"])
def test_ten_thousand_ranks_have_a_price(name):
    where = free((8,) * 1250 if name == "hierarchical" else (1,) * 10_000)
    formula = closed_form(name, 10**8, where)
    priced = price(ALLREDUCE[name](where.mesh, 1), 10**8, where)
    assert priced.seconds == pytest.approx(formula, rel=TIGHT)


def test_a_large_schedule_without_symmetry_is_refused_with_advice():
    where = free((*(8,) * 1249, 7))
    with pytest.raises(StrettoError, match=r"ring for 9,999 ranks .* equally many ranks"):
        price(ALLREDUCE["ring"](where.mesh, 1), 10**8, where)

"""The optimum of the MILP relaxation is a lower bound: no plan that fits is faster."""

import itertools
import random

import pytest

from benchmarks.memory_limits import drawn_profile
from stretto.planner.check import check
from stretto.planner.heuristic_split import random_plans_within
from stretto.planner.memory import Footprints
from stretto.planner.milp import MilpModel
from stretto.planner.planner import group_units, solver_arrays
from stretto.planner.presets import (
    PLAN_PRESETS,
    PresetOptions,
    add_barrier,
    preset_plan,
    random_plan,
)
from stretto.planner.profile import Link, Profile, UnitCost
from stretto.planner.solver import Solver
from stretto.planner.timing import time_plan
from stretto.planner.unit_choices import PlanConstraints, all_options

pytestmark = pytest.mark.usefixtures("kept_solvers")

SAME = 1e-7


@pytest.fixture(scope="module")
def solver():
    with Solver() as solver:
        yield solver


def bound_s(solver, profile, memory_limit, constraints, groups=0):
    """Return the lower bound of the step time; ``groups`` limits the groups of units unless 0."""
    options = all_options(profile, constraints, Footprints(profile))
    count = len(profile.units)
    unit_groups = group_units([1.0] * count, groups or count)
    problem = MilpModel(profile, options, unit_groups, constraints).problem(memory_limit)
    found = solver.solve(solver_arrays(problem), integral=False, limit_s=10)
    assert found is not None
    assert found.x is not None
    return problem.base_s - problem.slack_s + found.bound


def small_profile(seed):
    """Return a random profile of one lane and at most eight units."""
    profile = drawn_profile(random.Random(seed))
    link = profile.link.model_copy(update={"lanes": 1})
    return profile.model_copy(update={"units": profile.units[:8], "link": link})


def drawn_plans(profile, seed, barrier):
    """Return presets with all settings, and random plans in blocks."""
    preset_settings = [
        PresetOptions(
            prefetch, reduce_slots, barrier=barrier, in_host=in_host, checkpoint=checkpoint
        )
        for prefetch in (1, None)
        for reduce_slots in (1, None)
        for in_host in (False, True)
        for checkpoint in (False, True)
    ]
    plans = [
        preset_plan(name, profile.shapes, preset_options)
        for name in PLAN_PRESETS
        for preset_options in preset_settings
    ]
    for number in range(30):
        plan = random_plan(profile.shapes, 1000 * seed + number)
        plans.append(add_barrier(plan) if barrier else plan.replace(barrier=False))
    return plans


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_no_plan_that_fits_takes_less_than_the_bound(solver, seed, barrier):
    profile, constraints = small_profile(seed), PlanConstraints(barrier=barrier, checkpoint=True)
    footprints = Footprints(profile)
    plans = drawn_plans(profile, seed, barrier)
    # Half of the plans fit.
    memory_limit = sorted(map(footprints.peak, plans))[len(plans) // 2]
    plans_that_fit = [plan for plan in plans if footprints.peak(plan) <= memory_limit]
    assert len(plans_that_fit) >= len(plans) // 2
    least_s = bound_s(solver, profile, memory_limit, constraints)
    grouped_s = bound_s(solver, profile, memory_limit, constraints, groups=3)
    for plan in plans_that_fit:
        check(plan)
        step_s = time_plan(plan, profile).step_s
        assert step_s >= least_s * (1 - SAME)
        assert step_s >= grouped_s * (1 - SAME)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_no_random_plan_that_fills_the_memory_takes_less_than_the_bound(solver, seed, barrier):
    profile, constraints = small_profile(seed), PlanConstraints(barrier=barrier)
    preset_options = PresetOptions(prefetch=1, barrier=barrier)
    memory_limit = Footprints(profile).peak(preset_plan("zero2", profile.shapes, preset_options))
    least_s = bound_s(solver, profile, memory_limit, constraints)
    drawn = random_plans_within(profile, memory_limit, 30, seed, constraints)
    assert len(drawn) >= 20
    assert min(one.step_s for one in drawn) >= least_s * (1 - SAME)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_no_preset_takes_less_than_the_bound_at_its_own_peak(solver, seed, barrier):
    profile, constraints = small_profile(seed), PlanConstraints(barrier=barrier, checkpoint=True)
    footprints = Footprints(profile)
    for name, prefetch in itertools.product(("zero2", "zero3"), (0, 1, 3)):
        plan = preset_plan(name, profile.shapes, PresetOptions(prefetch, prefetch, barrier=barrier))
        least_s = bound_s(solver, profile, footprints.peak(plan), constraints)
        assert time_plan(plan, profile).step_s >= least_s * (1 - SAME), (name, prefetch)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_groups_and_more_memory_never_raise_the_bound(solver, seed, barrier):
    profile, constraints = small_profile(seed), PlanConstraints(barrier=barrier)
    footprints = Footprints(profile)
    preset_options = PresetOptions(prefetch=1, reduce_slots=1, barrier=barrier)
    low, high = (
        footprints.peak(preset_plan(n, profile.shapes, preset_options)) for n in ("zero3", "dear")
    )
    # Tie-breaking costs shift the bound a little, more for larger groups.
    slack_s = 2e-4 * (profile.compute_s + profile.update_s)
    for groups in (0, 4, 2):
        memory_limits = [round(low + share * max(high - low, 0)) for share in (0.0, 0.3, 0.6, 1.0)]
        bounds_s = [
            bound_s(solver, profile, memory_limit, constraints, groups)
            for memory_limit in memory_limits
        ]
        for less, more in itertools.pairwise(bounds_s):
            assert more <= less + slack_s
        ungrouped_s = [
            bound_s(solver, profile, memory_limit, constraints) for memory_limit in memory_limits
        ]
        for grouped, ungrouped in zip(bounds_s, ungrouped_s, strict=True):
            assert grouped <= ungrouped + slack_s


def three_units(ranks=2, slowdown=1.0):
    """Return a profile in which only the middle unit sends anything: 1 s for each message."""
    units = [
        UnitCost(name=name, numel=numel, forward_s=1.0, backward_s=2.0, activation_bytes=100)
        for name, numel in (("in", 1), ("mid", 1_000_000), ("out", 1))
    ]
    link = Link(ranks=ranks, bytes_per_s=2e6)
    return Profile(units=tuple(units), link=link, slowdown=slowdown)


@pytest.mark.parametrize("barrier", [False, True])
def test_one_rank_takes_what_it_computes(solver, barrier):
    profile = three_units(ranks=1).model_copy(update={"update_s": 0.5})
    takes_s = bound_s(solver, profile, 1 << 30, PlanConstraints(barrier=barrier))
    assert takes_s == pytest.approx(9 + 0.5 * barrier, rel=2e-4)
    assert takes_s <= 9 + 0.5 * barrier


def test_computation_beside_messages_is_slower_in_the_bound_too(solver):
    # Both messages of the middle unit, 2 s, overlap the backward and forward of the first one. In
    # these 2 s, a third of the computation is lost.
    takes_s = bound_s(solver, three_units(slowdown=1.5), 1 << 30, PlanConstraints())
    assert takes_s == pytest.approx(9 + 2 * (1 - 1 / 1.5), rel=2e-4)
    assert time_plan(
        preset_plan("dear", three_units().shapes), three_units(slowdown=1.5)
    ).step_s == (pytest.approx(9 + 2 * (1 - 1 / 1.5), rel=2e-4))


def test_a_barrier_separates_reductions_and_unshards_in_the_bound(solver):
    # The reduction takes 1 s of the first unit's backward, the unshard 1 s of its forward: nothing
    # waits. On a link half as fast each needs 2 s, but the unshard has only 1 s: 1 s is waited.
    slow = three_units()
    link = slow.link.model_copy(update={"bytes_per_s": 1e6})
    slow = slow.model_copy(update={"link": link})
    only = {"shardings": PlanConstraints().shardings[2:3]}
    assert bound_s(
        solver, three_units(), 1 << 30, PlanConstraints(barrier=True, **only)
    ) == pytest.approx(9, rel=2e-4)
    assert bound_s(solver, slow, 1 << 30, PlanConstraints(barrier=True, **only)) == pytest.approx(
        10, rel=2e-4
    )
    # Without a barrier the link has both slots, 3 s, for all 4 s.
    assert bound_s(solver, slow, 1 << 30, PlanConstraints(**only)) == pytest.approx(10, rel=2e-4)


@pytest.mark.parametrize("seed", range(30))
def test_groups_contain_all_units_in_order_and_are_few(seed):
    draw = random.Random(seed)
    weights = [draw.choice([0.0, 1.0, draw.random(), 20.0]) for _ in range(draw.randint(1, 60))]
    most = draw.randint(1, 20)
    groups = group_units(weights, most)
    assert [unit for group in groups for unit in group] == list(range(len(weights)))
    assert all(len(group) for group in groups)
    assert len(groups) <= most
    if len(weights) <= most:
        assert all(len(group) == 1 for group in groups)


@pytest.mark.parametrize("seed", range(15))
def test_the_heaviest_group_is_as_light_as_can_be(seed):
    draw = random.Random(seed)
    weights = [draw.uniform(0.1, 5.0) for _ in range(9)]
    groups = group_units(weights, 4)
    heaviest = max(sum(weights[unit] for unit in group) for group in groups)
    least = min(
        max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *bounds, 9)))
        for bounds in itertools.combinations(range(1, 9), 3)
    )
    assert heaviest == pytest.approx(least)

"""The optimum of the relaxed problem is a bound: no plan that fits is faster."""

import itertools
import random

import pytest

from benchmarks.budgets import drawn_profile
from stretto.plan.building import with_barrier
from stretto.plan.check import check
from stretto.plan.footprint import Footprints
from stretto.plan.groups import group_units
from stretto.plan.handsplit import random_candidates
from stretto.plan.options import Allowed, all_options
from stretto.plan.planner import _arrays
from stretto.plan.presets import PRESETS, Wish, named_plan, random_plan
from stretto.plan.profile import Link, Profile, UnitCost
from stretto.plan.relaxed import Relaxation
from stretto.plan.solving import Solver
from stretto.plan.timing import time_plan

SAME = 1e-7


@pytest.fixture(scope="module")
def solver():
    with Solver() as solver:
        yield solver


def bound_s(solver, profile, budget, allowed, groups=0):
    """Return what no plan takes less than, with at most ``groups`` groups of units if told."""
    options = all_options(profile, allowed, Footprints(profile))
    count = len(profile.units)
    cut = group_units([1.0] * count, groups or count)
    problem = Relaxation(profile, options, cut, allowed).problem(budget)
    found = solver.solve(_arrays(problem), whole=False, limit_s=10)
    assert found is not None
    assert found.x is not None
    return problem.base_s - problem.slack_s + found.bound


def small_profile(seed):
    """Return a random profile of one lane and at most eight units."""
    profile = drawn_profile(random.Random(seed))
    link = profile.link.model_copy(update={"lanes": 1})
    return profile.model_copy(update={"units": profile.units[:8], "link": link})


def drawn_plans(profile, seed, barrier):
    """Return presets, random plans in blocks, with all that may be computed again or in a host."""
    wishes = [
        Wish(prefetch, pending, barrier=barrier, in_host=in_host, checkpoint=checkpoint)
        for prefetch in (1, None)
        for pending in (1, None)
        for in_host in (False, True)
        for checkpoint in (False, True)
    ]
    plans = [named_plan(name, profile.shapes, wish) for name in PRESETS for wish in wishes]
    for number in range(30):
        plan = random_plan(profile.shapes, 1000 * seed + number)
        plans.append(with_barrier(plan) if barrier else plan.replace(barrier=False))
    return plans


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_no_plan_that_fits_takes_less_than_the_bound(solver, seed, barrier):
    profile, allowed = small_profile(seed), Allowed(barrier=barrier, checkpoint=True)
    footprints = Footprints(profile)
    plans = drawn_plans(profile, seed, barrier)
    # So that half of them fit.
    budget = sorted(map(footprints.peak, plans))[len(plans) // 2]
    fitting = [plan for plan in plans if footprints.peak(plan) <= budget]
    assert len(fitting) >= len(plans) // 2
    least_s = bound_s(solver, profile, budget, allowed)
    grouped_s = bound_s(solver, profile, budget, allowed, groups=3)
    for plan in fitting:
        check(plan)
        step_s = time_plan(plan, profile).step_s
        assert step_s >= least_s * (1 - SAME)
        assert step_s >= grouped_s * (1 - SAME)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_that_was_drawn_to_fill_its_budget_takes_less_than_the_bound(solver, seed, barrier):
    profile, allowed = small_profile(seed), Allowed(barrier=barrier)
    wish = Wish(prefetch=1, barrier=barrier)
    budget = Footprints(profile).peak(named_plan("zero2", profile.shapes, wish))
    least_s = bound_s(solver, profile, budget, allowed)
    drawn = random_candidates(profile, budget, 30, seed, allowed)
    assert len(drawn) >= 20
    assert min(one.step_s for one in drawn) >= least_s * (1 - SAME)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_no_preset_takes_less_than_the_bound_of_just_what_it_needs(solver, seed, barrier):
    profile, allowed = small_profile(seed), Allowed(barrier=barrier, checkpoint=True)
    footprints = Footprints(profile)
    for name, prefetch in itertools.product(("zero2", "zero3"), (0, 1, 3)):
        plan = named_plan(name, profile.shapes, Wish(prefetch, prefetch, barrier=barrier))
        least_s = bound_s(solver, profile, footprints.peak(plan), allowed)
        assert time_plan(plan, profile).step_s >= least_s * (1 - SAME), (name, prefetch)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_groups_and_more_memory_never_raise_the_bound(solver, seed, barrier):
    profile, allowed = small_profile(seed), Allowed(barrier=barrier)
    footprints = Footprints(profile)
    wish = Wish(prefetch=1, pending=1, barrier=barrier)
    low, high = (footprints.peak(named_plan(n, profile.shapes, wish)) for n in ("zero3", "dear"))
    # Preferences among equals weigh a little, and more where groups are larger.
    slack_s = 2e-4 * (profile.compute_s + profile.update_s)
    for groups in (0, 4, 2):
        budgets = [round(low + share * max(high - low, 0)) for share in (0.0, 0.3, 0.6, 1.0)]
        bounds_s = [bound_s(solver, profile, budget, allowed, groups) for budget in budgets]
        for less, more in itertools.pairwise(bounds_s):
            assert more <= less + slack_s
        alone_s = [bound_s(solver, profile, budget, allowed) for budget in budgets]
        for grouped, alone in zip(bounds_s, alone_s, strict=True):
            assert grouped <= alone + slack_s


def three_units(ranks=2, slowdown=1.0):
    """Return a profile of which only the middle unit has anything to send: 1 s for each message."""
    units = [
        UnitCost(name=name, numel=numel, forward_s=1.0, backward_s=2.0, activation_bytes=100)
        for name, numel in (("in", 1), ("mid", 1_000_000), ("out", 1))
    ]
    link = Link(ranks=ranks, bytes_per_s=2e6)
    return Profile(units=tuple(units), link=link, slowdown=slowdown)


@pytest.mark.parametrize("barrier", [False, True])
def test_one_rank_takes_what_it_computes(solver, barrier):
    profile = three_units(ranks=1).model_copy(update={"update_s": 0.5})
    takes_s = bound_s(solver, profile, 1 << 30, Allowed(barrier=barrier))
    assert takes_s == pytest.approx(9 + 0.5 * barrier, rel=2e-4)
    assert takes_s <= 9 + 0.5 * barrier


def test_computation_beside_messages_is_slower_in_the_bound_too(solver):
    # Both messages of the middle unit, 2 s, fit beside the backward and forward of the first one:
    # in these 2 s a third of the computation is lost.
    takes_s = bound_s(solver, three_units(slowdown=1.5), 1 << 30, Allowed())
    assert takes_s == pytest.approx(9 + 2 * (1 - 1 / 1.5), rel=2e-4)
    assert time_plan(
        named_plan("dear", three_units().shapes), three_units(slowdown=1.5)
    ).step_s == (pytest.approx(9 + 2 * (1 - 1 / 1.5), rel=2e-4))


def test_a_barrier_keeps_reductions_and_gathers_apart_in_the_bound(solver):
    # The reduction takes 1 s of the first unit's backward, the gather 1 s of its forward: nothing
    # waits. Of a link half as fast, each needs 2 s: the gather has only 1 s, and 1 s is waited.
    slow = three_units()
    link = slow.link.model_copy(update={"bytes_per_s": 1e6})
    slow = slow.model_copy(update={"link": link})
    only = {"shardings": Allowed().shardings[2:3]}
    assert bound_s(solver, three_units(), 1 << 30, Allowed(barrier=True, **only)) == pytest.approx(
        9, rel=2e-4
    )
    assert bound_s(solver, slow, 1 << 30, Allowed(barrier=True, **only)) == pytest.approx(
        10, rel=2e-4
    )
    # Without one the link has both slots, 3 s, for all 4 s.
    assert bound_s(solver, slow, 1 << 30, Allowed(**only)) == pytest.approx(10, rel=2e-4)


@pytest.mark.parametrize("seed", range(30))
def test_groups_are_all_units_in_order_and_few(seed):
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
        max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, 9)))
        for cuts in itertools.combinations(range(1, 9), 3)
    )
    assert heaviest == pytest.approx(least)

"""What says how good the planner is must be right itself: three ways to the same optimum."""

from itertools import pairwise

import pytest

from stretto.plan.check import check
from stretto.plan.footprint import Footprints
from stretto.plan.presets import PRESETS, Wish, named_plan
from stretto.plan.timing import time_plan
from tests.exact.enumerate import best_plan
from tests.exact.instances import QUANTUM_S, draw_instance, draw_plan, frugal_plan
from tests.exact.problem import solve, solver_python
from tests.exact.repeating import steady_quanta

needs_solver = pytest.mark.skipif(
    solver_python() is None, reason="no interpreter here has OR-Tools (the extra exact)"
)
FEW = [(1, 0), (1, 2), (1, 7), (2, 0), (2, 2), (2, 5), (2, 9), (2, 17), (2, 19)]
MORE = [(3, 0), (3, 6), (3, 7), (3, 8)]
"""Units and seed; others of three units take up to a minute to look at one by one."""


@needs_solver
def test_looking_at_all_plans_finds_what_the_solver_finds():
    instances = [draw_instance(seed, units) for units, seed in FEW + MORE]
    for instance, exact in zip(instances, solve(instances), strict=True):
        best = best_plan(instance)
        timed_s = time_plan(best, instance.profile).step_s
        assert exact.proven
        assert exact.step_s == pytest.approx(timed_s, rel=1e-9)
        assert Footprints(instance.profile).peak(best) <= instance.budget


@needs_solver
def test_no_plan_that_fits_is_faster_than_the_optimum():
    instances = [draw_instance(seed) for seed in (0, 3, 7, 10, 12, 16)]
    for instance, exact in zip(instances, solve(instances), strict=True):
        assert exact.proven
        profile, footprints = instance.profile, Footprints(instance.profile)
        wish = Wish(barrier=instance.barrier)
        plans = [named_plan(name, profile.shapes, wish) for name in PRESETS]
        plans += [draw_plan(instance, seed) for seed in range(200)]
        fitting = [plan for plan in plans if footprints.peak(plan) <= instance.budget]
        assert fitting
        for plan in fitting:
            assert steady_quanta(plan, profile) * QUANTUM_S >= exact.step_s * (1 - 1e-9)


@needs_solver
@pytest.mark.parametrize("seed", [0, 3, 12])
def test_more_memory_is_never_slower(seed):
    drawn = draw_instance(seed)
    budgets = [round(drawn.budget * share) for share in (1.0, 1.1, 1.3, 2.0)]
    solved = solve([drawn._replace(budget=budget) for budget in budgets])
    steps_s = [exact.step_s for exact in solved]
    assert all(exact.proven for exact in solved)
    assert all(more <= less + 1e-9 for less, more in pairwise(steps_s))


@needs_solver
def test_the_least_memory_is_enough_and_nothing_is_not():
    drawn = draw_instance(0, 3)
    least = Footprints(drawn.profile).peak(frugal_plan(drawn.profile, barrier=drawn.barrier))
    (exact,) = solve([drawn._replace(budget=least)])
    assert exact.proven
    with pytest.raises(AssertionError, match="INFEASIBLE"):
        solve([drawn._replace(budget=least // 4)])


@pytest.mark.parametrize("seed", range(40))
def test_an_instance_is_what_it_is_said_to_be(seed):
    instance = draw_instance(seed)
    assert instance == draw_instance(seed)
    profile, footprints = instance.profile, Footprints(instance.profile)
    dear = named_plan("dear", profile.shapes, Wish(barrier=instance.barrier))
    frugal = frugal_plan(profile, barrier=instance.barrier)
    check(frugal)
    least, most = footprints.peak(frugal), footprints.peak(dear)
    assert least <= instance.budget <= max(least, most)
    zero2 = named_plan("zero2", profile.shapes)
    assert 0.25 <= profile.channel_s(zero2) / profile.compute_s <= 2.2


def test_the_clock_says_of_any_plan_what_its_graph_says():
    for seed in range(200):
        instance = draw_instance(seed)
        for drawn in range(5):
            plan = draw_plan(instance, drawn)
            check(plan)
            taken_s = steady_quanta(plan, instance.profile) * QUANTUM_S
            assert time_plan(plan, instance.profile).step_s == pytest.approx(taken_s), (seed, drawn)
